"""Which units are gathered early, and how torch is told.

Order is module order, never mesh order. Without targets torch prefetches one unit in backward by itself, so "off" has
to be said explicitly.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtrain.distributed.fsdp2.shard_plan import ShardPlan


def plan_prefetch(order: Sequence[str], depth: int, *, first: str | None = None) -> dict[str, tuple[str, ...]]:
    """Map each unit to the ``depth`` units that follow it.

    Args:
        order: Unit fqns in the order in which a pass runs them.
        depth: Units ahead; 0 maps every unit to nothing.
        first: A unit that runs before ``order`` without being a target itself: the root in backward, whose parameters
            are still there.
    """
    sequence = [first, *order] if first is not None else list(order)
    return {fqn: tuple(sequence[i + 1 : i + 1 + depth]) for i, fqn in enumerate(sequence) if fqn is not None}


def apply_prefetch(model: nn.Module, plan: ShardPlan) -> None:
    """Hand the planned targets to torch."""
    for unit in plan.units:
        module = fsdp_module(model, unit.fqn)
        module.set_modules_to_forward_prefetch([fsdp_module(model, fqn) for fqn in unit.forward_prefetch])
        targets = [fsdp_module(model, fqn) for fqn in unit.backward_prefetch]
        # An empty list means "torch's default of one"; a unit that targets itself is already gathered, hence no target.
        module.set_modules_to_backward_prefetch(targets or [module])


def fsdp_module(model: nn.Module, fqn: str) -> FSDPModule:
    """The wrapped module at ``fqn``."""
    module = model.get_submodule(fqn)
    assert isinstance(module, FSDPModule), f"{fqn!r} is not wrapped"
    return module
