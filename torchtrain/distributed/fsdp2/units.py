"""Which parameters travel together: one unit per decoder block, then the root.

Pure: reads names and shapes of a model, a meta-device one will do.
"""

from __future__ import annotations

from torch import nn

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.prefetch import plan_prefetch
from torchtrain.distributed.fsdp2.shard_plan import ROOT, ShardedParameter, ShardUnit
from torchtrain.nn.decoder_block import DecoderBlock


def plan_shard_units(model: nn.Module, config: FSDP2Config) -> tuple[ShardUnit, ...]:
    """Group the parameters of a decoder, or of one pipeline stage of it, into shard units.

    A decoder block is a unit whatever container holds it. What no block owns, and what a block shares with the outside
    (a tied weight), belongs to the root.

    Returns:
        The root, then the blocks in module order; together they cover every parameter exactly once.
    """
    block_fqns = [fqn for fqn, module in model.named_modules() if isinstance(module, DecoderBlock)]
    owned: dict[str, list[ShardedParameter]] = {ROOT: [], **{fqn: [] for fqn in block_fqns}}
    owners: dict[int, set[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), set()).add(_deepest_owner(fqn, block_fqns))
    for fqn, parameter in model.named_parameters():
        candidates = owners[id(parameter)]
        owner = candidates.pop() if len(candidates) == 1 else ROOT
        owned[owner].append(ShardedParameter(fqn, tuple(parameter.shape)))
    order = (ROOT, *block_fqns)
    forward = plan_prefetch(order, config.forward_prefetch_depth)
    backward = plan_prefetch(tuple(reversed(block_fqns)), config.backward_prefetch_depth, first=ROOT)
    return tuple(
        ShardUnit(
            fqn=fqn,
            parameters=tuple(owned[fqn]),
            # The root's parameters are needed again as soon as backward begins.
            reshard_after_forward=config.reshard_after_forward and fqn != ROOT,
            forward_prefetch=forward[fqn],
            backward_prefetch=backward[fqn],
        )
        for fqn in order
    )


def _deepest_owner(fqn: str, block_fqns: list[str]) -> str:
    inside = [block for block in block_fqns if fqn.startswith(f"{block}.")]
    return max(inside, key=len, default=ROOT)
