"""Dispatchers by the names that a job calls them."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from torchtrain.config.parallel import EpDispatcher
from torchtrain.distributed.expert_parallel.domino import DominoDispatcher
from torchtrain.distributed.expert_parallel.eager import EagerDispatcher
from torchtrain.distributed.expert_parallel.fused import FusedDispatcher
from torchtrain.distributed.expert_parallel.mc2 import MC2Dispatcher
from torchtrain.nn.moe import TokenDispatcher

_BUILDERS: dict[EpDispatcher, Callable[..., TokenDispatcher]] = {
    "eager": EagerDispatcher,
    "fused": FusedDispatcher,
    "domino": DominoDispatcher,
    "mc2": MC2Dispatcher,
}


def build_dispatcher(name: EpDispatcher, group: dist.ProcessGroup, *, is_exchange_kept: bool) -> TokenDispatcher:
    """Build the dispatcher that a job asks for.

    Args:
        name: ``dist_config.ep_dispatcher``.
        group: Ranks that the experts are split over, in the order of the experts.
        is_exchange_kept: Whether activation checkpointing keeps what travelled, or exchanges again.
    """
    return _BUILDERS[name](group, is_exchange_kept=is_exchange_kept)
