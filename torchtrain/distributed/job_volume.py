"""What one rank must move in one step of a job, all techniques together: what a trace of that rank is held against.

Adds up the closed formulas of ``comm_volume`` (FSDP), ``tensor_volume``, ``attention_volume`` (context parallelism) and
``pipeline_volume``, each for the layers that this rank has. No process group and no weights are needed. Left out are
the scalars that every job sends once a step: counts of tokens, losses, and the gradient norm but for the axis ``tp``.
Not for experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch import nn

from torchtrain.config.job import Job
from torchtrain.distributed.attention_volume import AttentionSizes, plan_attention_volume
from torchtrain.distributed.comm_volume import (
    DTYPE_BYTES,
    CommVolume,
    length_of_part,
    local_shape,
    plan_comm_volume,
)
from torchtrain.distributed.fsdp2.shard_plan import ShardedParameter, ShardPlan
from torchtrain.distributed.fsdp2.source_layout import SourceLayout
from torchtrain.distributed.fsdp2.units import plan_shards, plan_stage_shards
from torchtrain.distributed.pipeline_parallel.split import measure_costs, split_into_stages
from torchtrain.distributed.pipeline_parallel.stage_plan import SPLIT_BACKWARD, plan_pipeline, pp_micro_batch_size
from torchtrain.distributed.pipeline_volume import plan_pipeline_volume
from torchtrain.distributed.tensor_parallel.plan import Style, TensorParallelPlan, plan_tensor_parallel
from torchtrain.distributed.tensor_volume import TensorSizes, plan_partial_gradient_volume, plan_tensor_volume
from torchtrain.distributed.topology import Topology
from torchtrain.nn.decoder import Decoder


@dataclass(frozen=True)
class _RankPart:
    """What one rank has of a model, and where it stands."""

    pp_rank: int
    shard_rank: int
    tp_rank: int
    layers: tuple[int, ...]
    """Global indices."""
    holds_embedding: bool
    holds_head: bool
    shards: tuple[ShardPlan, ...]
    """One for each stage, none without FSDP."""
    parameters: tuple[ShardedParameter, ...]
    """Of all stages, as FSDP would plan them, be it in use or not."""
    partial: frozenset[str]
    """Fqns of parameters whose gradients are partial over tp."""


@dataclass(frozen=True)
class _Dtypes:
    """Bytes of an element."""

    compute: int
    stream: int
    """The residual stream inside of a stage."""
    boundary: int
    """The residual stream from stage to stage."""
    gradient: int


def find_missing_formula(job: Job, topology: Topology, *, has_experts: bool) -> str | None:
    """Say what of a job has no closed formula, or is not seen by a trace; None where everything has and is."""
    accelerator, recompute = job.accelerator, job.activation_checkpoint.mode
    has_activations = topology.tp_size > 1 or topology.cp_size > 1
    if has_experts or topology.ep_size > 1:
        return "the exchange of tokens between experts depends on the router"
    if job.compile.enabled and has_activations:
        return "compile.enabled hides what tensor and context parallelism send inside of a block"
    if topology.pp_size > 1 and has_activations and accelerator.pp_schedule in SPLIT_BACKWARD and recompute != "none":
        return (
            f"{accelerator.pp_schedule} splits backward, and activation_checkpoint.mode: {recompute} then computes a "
            "block, and sends for it, once more for every group of its weights"
        )
    return None


def plan_job_volume(
    job: Job, topology: Topology, model: nn.Module, *, rank: int, tensor_parallel_table: Mapping[str, Style]
) -> tuple[CommVolume, ...]:
    """Add up the closed formulas for one rank of a job.

    Args:
        job: The checked job, one for which `find_missing_formula` finds nothing.
        topology: Of its world.
        model: The whole decoder on meta, as the family builds it; afterwards it has only what this rank has.
        rank: Global rank.
        tensor_parallel_table: The family's table of modules.

    Returns:
        One entry for each unit, phase, kind and axis, in the order of techniques: FSDP, tp, cp, pp.
    """
    decoder = cast(Decoder, model)
    attention = decoder.blocks()[0].self_attn
    assert attention is not None, "layers without attention have no formula"
    hidden_size, vocab_size = _embedding_size(decoder)
    part = _take_part(job, topology, decoder, rank, tensor_parallel_table)
    dtypes = _resolve_dtypes(job, topology)
    micro_batch_size = pp_micro_batch_size(job) if topology.pp_size > 1 else job.training.micro_batch_size
    num_micro_batches = job.training.global_batch_size // (micro_batch_size * topology.dp_size)
    num_tokens = micro_batch_size * job.training.seq_len
    num_recomputed_layers = _count_recomputed(job, part.layers)
    tensor = TensorSizes(
        tp_size=topology.tp_size,
        num_tokens=num_tokens // topology.cp_size,
        num_layers=len(part.layers),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        element_bytes=dtypes.compute,
        is_sequence_parallel=job.accelerator.sequence_parallel,
        is_loss_parallel=job.accelerator.loss_parallel,
        stream_bytes=dtypes.stream,
        holds_embedding=part.holds_embedding,
        holds_head=part.holds_head,
    )
    context = AttentionSizes(
        cp_size=topology.cp_size,
        num_tokens=num_tokens,
        num_layers=len(part.layers),
        num_attention_heads=attention.o_proj.in_features // attention.head_dim // topology.tp_size,
        num_key_value_heads=attention.k_proj.out_features // attention.head_dim // topology.tp_size,
        head_dim=attention.head_dim,
        element_bytes=dtypes.compute,
    )
    times = {"num_micro_batches": num_micro_batches, "num_recomputed_layers": num_recomputed_layers}
    volumes = [
        *_shard_volumes(job, topology, part, num_micro_batches),
        *plan_tensor_volume(tensor, **times),
        *_partial_gradients(topology, part, dtypes),
        *plan_attention_volume(job.accelerator.cp_mode, context, **times),
    ]
    if topology.pp_size > 1:
        tokens_here = num_tokens // topology.cp_size // (topology.tp_size if tensor.is_sequence_parallel else 1)
        volumes += plan_pipeline_volume(
            job.accelerator.pp_schedule,
            pp_size=topology.pp_size,
            pp_rank=part.pp_rank,
            num_micro_batches=num_micro_batches,
            micro_batch_bytes=tokens_here * hidden_size * dtypes.boundary,
        )
    return _add_up(volumes)


def _take_part(job: Job, topology: Topology, decoder: Decoder, rank: int, table: Mapping[str, Style]) -> _RankPart:
    """Plan as ``parallelize`` does, and cut the model down to one rank's stages."""
    split = None
    if topology.tp_size > 1:
        is_sequence_parallel = job.accelerator.sequence_parallel
        split = plan_tensor_parallel(
            decoder, table, tp_size=topology.tp_size, is_sequence_parallel=is_sequence_parallel
        )
    layouts = {} if split is None else {fqn: SourceLayout("tp", p) for fqn, p in split.placements.items()}
    whole = plan_shards(decoder, job.fsdp_config, topology, layouts)
    pp_rank = rank // topology.stage_size
    _, shard_rank, tp_rank = topology.fsdp_non_moe_mesh_ranks(pp_rank).coordinate(rank)
    plans = (whole,)
    if topology.pp_size > 1:
        plan = plan_pipeline(
            job.accelerator.pp_schedule,
            pp_size=topology.pp_size,
            num_layers=len(decoder.layers),
            costs=measure_costs(decoder),
            pp_layers=job.accelerator.pp_layers,
        )
        stages = split_into_stages(decoder, plan, pp_rank)
        plans = tuple(plan_stage_shards(whole, stage, job.fsdp_config) for stage in stages)
    return _RankPart(
        pp_rank=pp_rank,
        shard_rank=shard_rank,
        tp_rank=tp_rank,
        layers=tuple(int(index) for index in decoder.layers),
        holds_embedding=decoder.embed_tokens is not None,
        holds_head=decoder.lm_head is not None,
        shards=plans if topology.has_fsdp_domain else (),
        parameters=tuple(p for plan in plans for unit in plan.units for p in unit.parameters),
        partial=_partial_fqns(split),
    )


def _partial_fqns(plan: TensorParallelPlan | None) -> frozenset[str]:
    return frozenset(p.fqn for p in plan.parameters if p.is_gradient_partial) if plan else frozenset()


def _embedding_size(decoder: Decoder) -> tuple[int, int]:
    assert decoder.embed_tokens is not None, "the whole model has an embedding"
    vocab_size, hidden_size = decoder.embed_tokens.weight.shape
    return hidden_size, vocab_size


def _resolve_dtypes(job: Job, topology: Topology) -> _Dtypes:
    precision, storage = job.fsdp_config.mix_precision, DTYPE_BYTES[job.model.init_dtype]
    compute = storage if precision.param_dtype is None else DTYPE_BYTES[precision.param_dtype]
    # Autocast computes low and adds to what the embedding returned; FSDP casts what enters a block.
    stream = compute if topology.has_fsdp_domain else max(storage, compute)
    boundary = stream
    if topology.has_fsdp_domain and precision.output_dtype is not None:
        boundary = DTYPE_BYTES[precision.output_dtype]
    return _Dtypes(compute, stream, boundary, gradient=4 if precision.fp32_main_grad else storage)


def _count_recomputed(job: Job, layers: Sequence[int]) -> int:
    config = job.activation_checkpoint
    every = config.every_n_blocks if config.mode == "every_nth_block" else 1
    return 0 if config.mode == "none" else sum(index % every == 0 for index in layers)


def _shard_volumes(job: Job, topology: Topology, part: _RankPart, num_micro_batches: int) -> Iterable[CommVolume]:
    config = job.fsdp_config
    if topology.pp_size > 1:
        # Gathered before the first micro-batch, reduced after the last, whatever the job says.
        config = replace(config, requires_grad_sync=False, reshard_after_backward=False)
    for plan in part.shards:
        yield from plan_comm_volume(
            plan,
            config,
            storage_dtype=job.model.init_dtype,
            num_micro_batches=num_micro_batches,
            tp_size=topology.tp_size,
            tp_rank=part.tp_rank,
        )


def _partial_gradients(topology: Topology, part: _RankPart, dtypes: _Dtypes) -> tuple[CommVolume, ...]:
    def numel(parameter: ShardedParameter) -> int:
        shape = list(local_shape(parameter, topology.tp_size, part.tp_rank))
        if part.shards and not parameter.is_replicated:
            dim = parameter.shard_dim
            shape[dim] = length_of_part(shape[dim], topology.dp_shard_size, part.shard_rank)
        return math.prod(shape)

    split = [p for p in part.parameters if p.source is not None and p.source.placement.is_shard()]
    return plan_partial_gradient_volume(
        [numel(parameter) for parameter in part.parameters if parameter.fqn in part.partial],
        tp_size=topology.tp_size,
        gradient_bytes=dtypes.gradient,
        num_layouts=len({parameter.is_replicated and bool(part.shards) for parameter in split}),
    )


def _add_up(volumes: Iterable[CommVolume]) -> tuple[CommVolume, ...]:
    """Join what two stages of one rank, or two techniques, move under one name."""
    sums: dict[tuple[str | None, str, str, str], CommVolume] = {}
    for volume in volumes:
        key = (volume.unit or None, volume.phase, volume.kind, volume.axis)
        before = sums.get(key, CommVolume(*key, 0, 0, 0))
        sums[key] = CommVolume(
            *key,
            before.count + volume.count,
            before.bytes + volume.bytes,
            before.sent_bytes + volume.sent_bytes,
        )
    return tuple(volume for volume in sums.values() if volume.count)
