"""How many collectives a unit needs: one per parameter, or one for all of them, with or without copying shards for it.

``fsdp_config.comm_fusion`` and ``comm_fusion_zero_copy``. None of it changes a number in training.
"""

from __future__ import annotations

from enum import Enum

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.param_group_internals import adopt_zero_copy, split_param_groups
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)


class CommFusion(Enum):
    """What happens to the shards of a unit's parameters on their way into an all-gather."""

    OFF = "one collective per parameter"
    COPY_IN = "one collective per unit, shards copied into its buffer"
    ZERO_COPY = "one collective per unit, shards lie in its buffer"


def resolve_comm_fusion(config: FSDP2Config) -> CommFusion:
    """Read both keys; zero copy is the default of a fused unit, and means nothing without fusion."""
    if not config.comm_fusion:
        return CommFusion.OFF
    return CommFusion.COPY_IN if config.comm_fusion_zero_copy is False else CommFusion.ZERO_COPY


def apply_comm_fusion(model: nn.Module, config: FSDP2Config) -> None:
    """Regroup the parameters of every wrapped unit, once, after wrapping and before the first forward.

    A unit whose shards cannot lie in one buffer stays fused with copy-in, which the log says in one line.
    """
    fusion = resolve_comm_fusion(config)
    units = {fqn: module for fqn, module in model.named_modules() if isinstance(module, FSDPModule)}
    if fusion is CommFusion.OFF:
        for module in units.values():
            split_param_groups(module)
    elif fusion is CommFusion.ZERO_COPY:
        _say_what_copies({fqn: adopt_zero_copy(module) for fqn, module in units.items()})


def _say_what_copies(obstacles: dict[str, list[str]]) -> None:
    first_unit: dict[str, str] = {}
    for fqn, found in obstacles.items():
        for obstacle in found:
            first_unit.setdefault(obstacle, fqn or "the root")
    if first_unit:
        count = sum(bool(found) for found in obstacles.values())
        reasons = ", ".join(f"{obstacle} in {fqn}" for obstacle, fqn in first_unit.items())
        logger.info(f"comm_fusion_zero_copy: {count} of {len(obstacles)} units copy shards in all the same ({reasons})")
