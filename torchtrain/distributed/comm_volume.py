"""What FSDP must move in one step, in closed form: the numbers that a communication trace is held against. No torch.

Symbols, for one unit and one optimizer step of M micro-batches:

- S, R: ranks on the unit's shard and replicate axis; N = S R.
- p, g: bytes of an element in the gathers (``param_dtype``, else the storage dtype) and in the reductions
  (``reduce_dtype``, else as in the gathers).
- P: elements of the unit's sharded parameters, each padded along its sharded dim to a multiple of S:
  P = sum over parameters of ceil(d / S) S (numel / d). W: elements of those kept whole (``replicate_params``). With
  tensor parallelism sizes are those of this tp rank's part, of which the last rank's may be smaller.
- k: sharded parameters without comm fusion, 1 with it; w: the same for those kept whole. P_i: what each one carries.

Counts of collectives per step and their bytes (payloads, as ``collective_ops`` defines them):

===============================  ==========  ============================  ================  ====================
collective                       phase       times                         each carries      axis
===============================  ==========  ============================  ================  ====================
all-gather                       forward     k x F                         p P_i             shard
all-gather                       backward    k x B                         p P_i             shard
reduce-scatter                   backward    k x (M, or 1: see below)      g P_i             shard
all-reduce, R > 1                backward    k                             g P_i / S         replicate
all-reduce, kept whole           backward    w                             g W_i             the whole domain
===============================  ==========  ============================  ================  ====================

- ``reshard_after_backward: true``: F = M; B = M where ``reshard_after_forward`` holds for the unit, else 0.
- ``reshard_after_backward: false``: F = 1, as full parameters outlive a micro-batch; B = M or 0 as before.
- ``requires_grad_sync: true``: M reduce-scatters, one per micro-batch; false: 1, after the last one.
- S = 1: nothing is gathered or scattered, and the all-reduce carries P.
- The root never reshards after forward: its B is 0.
- Parameters without a gradient are gathered and not reduced.

With M = 1, everything fused and in one dtype of b bytes, ZeRO-3 is the familiar 3 b P per block: two gathers, one
reduction. Prefetching and activation checkpointing move when a gather happens, never how many there are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtrain.config.fsdp import FSDP2Config

if TYPE_CHECKING:  # it imports torch
    from torchtrain.distributed.fsdp2.shard_plan import ShardedParameter, ShardPlan, ShardUnit

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by the name that a job gives its dtype."""


@dataclass(frozen=True)
class CommVolume:
    """All collectives of one kind that one unit issues in one step, on every rank."""

    unit: str | None
    """``None`` where no FSDP unit asks for them."""
    phase: str
    kind: str
    axis: str
    count: int
    bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class _Recipe:
    """What a job says about every unit alike."""

    num_micro_batches: int
    param_bytes: int
    reduce_bytes: int
    is_fused: bool
    reshards_after_backward: bool
    syncs_every_micro_batch: bool
    tp_size: int
    tp_rank: int


def sent_bytes(kind: str, num_bytes: int, group_size: int) -> int:
    """Bytes that one rank sends for a payload of ``num_bytes``, by the ring algorithm, rounded up."""
    if kind in ("recv", "barrier"):
        return 0
    if kind == "send":
        return num_bytes
    rounds = (group_size - 1) * (2 if kind == "all_reduce" else 1)
    return -(-rounds * num_bytes // group_size)


def padded_numel(shape: Sequence[int], shard_dim: int, shard_size: int) -> int:
    """Elements of a parameter whose ``shard_dim`` is padded so that ``shard_size`` ranks hold equally much."""
    dim = shape[shard_dim]
    return -(-dim // shard_size) * shard_size * (math.prod(shape) // dim) if dim else 0


def length_of_part(length: int, num_parts: int, part: int) -> int:
    """What one of several ranks holds of a dim that torch splits: rounded up, so that the last get less or nothing."""
    longest = -(-length // num_parts)
    return min(longest, max(0, length - part * longest))


def local_shape(parameter: ShardedParameter, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """Shape of what FSDP finds of a parameter on one tensor-parallel rank."""
    source = parameter.source
    if source is None or source.axis != "tp":
        return parameter.shape
    # A ``Replicate`` has no dim; to ask for its class would import torch.
    split_dim = getattr(source.placement, "dim", None)
    return tuple(
        length_of_part(length, tp_size, tp_rank) if dim == split_dim else length
        for dim, length in enumerate(parameter.shape)
    )


def plan_comm_volume(
    plan: ShardPlan,
    config: FSDP2Config,
    *,
    storage_dtype: str,
    num_micro_batches: int,
    frozen: Collection[str] = (),
    tp_size: int = 1,
    tp_rank: int = 0,
) -> tuple[CommVolume, ...]:
    """Evaluate the formulas of this file for a shard plan.

    Args:
        plan: A ``ShardPlan`` whose parameters carry no expert-parallel layout.
        config: Section ``fsdp_config``.
        storage_dtype: ``model.init_dtype``.
        num_micro_batches: Of one optimizer step, per rank.
        frozen: Fqns of parameters without a gradient.
        tp_size: Ranks of the axis over which parameters with a source layout are split already.
        tp_rank: Whose volume.

    Returns:
        In the order of the plan; what is zero is left out.
    """
    precision = config.mix_precision
    param_dtype = precision.param_dtype or storage_dtype
    recipe = _Recipe(
        num_micro_batches,
        param_bytes=DTYPE_BYTES[param_dtype],
        reduce_bytes=DTYPE_BYTES[precision.reduce_dtype or param_dtype],
        is_fused=config.comm_fusion,
        reshards_after_backward=config.reshard_after_backward,
        syncs_every_micro_batch=config.requires_grad_sync,
        tp_size=tp_size,
        tp_rank=tp_rank,
    )
    volumes = (volume for unit in plan.units for volume in _unit_volumes(unit, plan.meshes[unit.mesh], recipe, frozen))
    return tuple(volume for volume in volumes if volume.bytes)


def domain_axis(axes: Sequence[tuple[str, int]]) -> str:
    """Name of all ranks that share a unit: the one axis that has them, or ``<prefix>_domain`` over two."""
    wide = [name for name, size in axes if size > 1]
    return wide[0] if len(wide) == 1 else f"{axes[0][0].partition('_')[0]}_domain"


def _unit_volumes(
    unit: ShardUnit, axes: Sequence[tuple[str, int]], recipe: _Recipe, frozen: Collection[str]
) -> Iterator[CommVolume]:
    name = unit.fqn or "root"
    *replicate, (shard_axis, shards) = axes
    sharded = [p for p in unit.parameters if not p.is_replicated]
    shapes = {p.fqn: local_shape(p, recipe.tp_size, recipe.tp_rank) for p in unit.parameters}
    gathered = {p.fqn: padded_numel(shapes[p.fqn], p.shard_dim, shards) for p in sharded}
    scattered = {fqn: numel for fqn, numel in gathered.items() if fqn not in frozen}
    whole = {p.fqn: math.prod(shapes[p.fqn]) for p in unit.parameters if p.is_replicated and p.fqn not in frozen}
    num_micro_batches = recipe.num_micro_batches
    if shards > 1:
        forwards = num_micro_batches if recipe.reshards_after_backward else 1
        backwards = num_micro_batches if unit.reshard_after_forward else 0
        syncs = num_micro_batches if recipe.syncs_every_micro_batch else 1
        gathers, scatters = _payloads(gathered, recipe), _payloads(scattered, recipe)
        yield _volume(name, "forward", "all_gather", shard_axis, shards, gathers * forwards, recipe.param_bytes)
        yield _volume(name, "backward", "all_gather", shard_axis, shards, gathers * backwards, recipe.param_bytes)
        yield _volume(name, "backward", "reduce_scatter", shard_axis, shards, scatters * syncs, recipe.reduce_bytes)
    for axis, replicas in replicate:
        pieces = _payloads({fqn: numel // shards for fqn, numel in scattered.items()}, recipe)
        yield _volume(name, "backward", "all_reduce", axis, replicas, pieces, recipe.reduce_bytes)
    domain = math.prod(size for _, size in axes)
    payloads = _payloads(whole, recipe)
    yield _volume(name, "backward", "all_reduce", domain_axis(axes), domain, payloads, recipe.reduce_bytes)


def _payloads(numels: dict[str, int], recipe: _Recipe) -> list[int]:
    """Elements of each collective."""
    return [sum(numels.values())] if recipe.is_fused and numels else list(numels.values())


def _volume(
    unit: str, phase: str, kind: str, axis: str, group_size: int, payloads: list[int], element_bytes: int
) -> CommVolume:
    sizes = [payload * element_bytes for payload in payloads]
    sent = sum(sent_bytes(kind, size, group_size) for size in sizes)
    return CommVolume(unit, phase, kind, axis, len(sizes), sum(sizes), sent)
