"""The order in which techniques are applied to a decoder: the only place that decides it.

A family brings what differs: a table of its modules for tensor parallelism. The rooms of the techniques are strangers
and meet here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.compile import apply_compile
from torchtrain.config.job import Job
from torchtrain.distributed.context_parallel.apply import apply_context_parallel
from torchtrain.distributed.expert_parallel.apply import apply_expert_parallel
from torchtrain.distributed.expert_parallel.dispatchers import build_dispatcher
from torchtrain.distributed.expert_parallel.load_counts import apply_load_counting
from torchtrain.distributed.expert_parallel.plan import plan_expert_parallel
from torchtrain.distributed.fsdp2.hidden_hooks import hide_hooks
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.fsdp2.source_layout import SourceLayout
from torchtrain.distributed.fsdpturbo.apply import apply_fsdpturbo
from torchtrain.distributed.fsdpturbo.legality import FSDPTurboModel
from torchtrain.distributed.fsdpturbo.plan import plan_fsdpturbo
from torchtrain.distributed.gradient_norm import warm_up_gradient_norm
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.pipeline_parallel.split import measure_costs, split_into_stages
from torchtrain.distributed.pipeline_parallel.stage_plan import PipelinePlan, plan_pipeline
from torchtrain.distributed.tensor_parallel.apply import apply_tensor_parallel
from torchtrain.distributed.tensor_parallel.plan import Style, plan_tensor_parallel
from torchtrain.distributed.tensor_parallel.vocabulary_loss import VocabParallelLoss
from torchtrain.losses.linear_cross_entropy import ChunkedLoss
from torchtrain.nn.decoder import Decoder, TokenLoss
from torchtrain.nn.moe import MoE, RoutedExperts
from torchtrain.nn.routing import force_balanced_routing
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

MOE_TABLE = {
    "": Style.TOKENWISE,
    "router": Style.TOKENWISE,
    "experts": Style.TOKENWISE,
    "shared_expert": Style.WHOLE_INPUT,
    "shared_expert.gate_proj": Style.COLUMN,
    "shared_expert.up_proj": Style.COLUMN,
    "shared_expert.down_proj": Style.ROW,
    "shared_expert_gate": Style.TOKENWISE,
}
"""What tensor parallelism makes of a layer with experts: only the shared expert, which every token visits, is split."""


def parallelize_decoder(
    model: nn.Module,
    job: Job,
    meshes: Meshes,
    *,
    tensor_parallel_table: Mapping[str, Style],
    fsdpturbo_model: FSDPTurboModel | None = None,
) -> tuple[nn.Module, ...]:
    """Apply tensor, expert and context parallelism, activation checkpointing, compile, stages, then FSDP.

    Tensor and expert parallelism come first, because what follows must see the layers as they compute. Compile sees the
    checkpointed block, so that it can plan around the recomputation. The pipeline is cut before FSDP, which wraps what
    is left on this rank. FSDP comes last, because its hooks must gather parameters before anything, compiled or
    recomputed, reads them.

    Args:
        model: The whole decoder, on meta or with memory.
        job: The checked job.
        meshes: Of this rank.
        tensor_parallel_table: The family's modules, without those inside of layers with experts: see ``MOE_TABLE``.
        fsdpturbo_model: What the family registered with the plugin fsdpturbo, if it did.

    Returns:
        What is called, in the order of the pipeline; ``(model,)`` without one.
    """
    decoder, topology = cast(Decoder, model), meshes.topology
    layouts = {
        **_split_over_tp(decoder, job, meshes, tensor_parallel_table),
        **_split_over_ep(decoder, job, meshes),
    }
    if topology.cp_size > 1:
        apply_context_parallel(decoder, job.accelerator.cp_mode, meshes.device_mesh["cp"])
    apply_load_counting(decoder, meshes.device_mesh, is_sequence_parallel=_is_sequence_parallel(job, meshes))
    if job.debug.force_balanced_routing:
        force_balanced_routing(decoder)
    token_loss = _choose_token_loss(job, meshes.fsdp_non_moe_mesh["tp"])
    if token_loss is not None:
        decoder.token_loss = token_loss
    apply_activation_checkpoint(decoder, job.activation_checkpoint)
    apply_compile(decoder, job.compile)
    ignored = _shard_experts_first(decoder, job, meshes, fsdpturbo_model) if topology.is_fsdpturbo else frozenset()
    chunks = _split_and_shard(decoder, job, meshes, layouts, ignored)
    if job.activation_checkpoint.mode == "selective_op":
        _hide_units_inside_blocks(decoder)
    if topology.is_fsdpturbo:
        warm_up_gradient_norm(decoder.parameters(), meshes.device)
    return chunks


def _shard_experts_first(
    decoder: Decoder, job: Job, meshes: Meshes, registered: FSDPTurboModel | None
) -> frozenset[str]:
    """Do the plugin's part; returns the parameters that the dense path must ignore.

    Experts come before everything dense in either implementation: with ``native`` they are FSDP units of their own on
    the plugin's mesh, which FSDP2Manager wraps before the block around them.
    """
    assert registered is not None, "the job check refuses the plugin for a family that is not registered with it"
    plan = plan_fsdpturbo(decoder, job.dist_config, registered, efsdp_size=meshes.topology.edp_shard_size)
    apply_fsdpturbo(decoder, plan, meshes, job.fsdp_config)
    return plan.ignored_parameters


def _split_and_shard(
    decoder: Decoder, job: Job, meshes: Meshes, layouts: Mapping[str, SourceLayout], ignored: frozenset[str]
) -> tuple[nn.Module, ...]:
    manager = FSDP2Manager(job.fsdp_config, meshes)
    shards = manager.plan(decoder, layouts, ignored) if meshes.topology.has_fsdp_domain else None
    if meshes.topology.pp_size == 1:
        if shards is not None:
            manager.parallelize(decoder, shards)
        return (decoder,)
    stages = split_into_stages(decoder, _plan_pipeline(decoder, job), meshes.pp_rank)
    if shards is not None:
        for stage in stages:
            manager.parallelize(stage, manager.plan_stage(shards, stage))
    return stages


def _hide_units_inside_blocks(decoder: Decoder) -> None:
    for module in decoder.modules():
        if isinstance(module, RoutedExperts) and isinstance(module, FSDPModule):
            hide_hooks(module)


def _split_over_tp(
    decoder: Decoder, job: Job, meshes: Meshes, table: Mapping[str, Style]
) -> Mapping[str, SourceLayout]:
    topology = meshes.topology
    if topology.tp_size == 1:
        return {}
    plan = plan_tensor_parallel(
        decoder,
        {**_moe_styles(decoder, has_expert_mesh=topology.has_expert_mesh), **table},
        tp_size=topology.tp_size,
        is_sequence_parallel=job.accelerator.sequence_parallel,
    )
    apply_tensor_parallel(decoder, plan, meshes.fsdp_non_moe_mesh["tp"])
    return {fqn: SourceLayout("tp", placement) for fqn, placement in plan.placements.items()}


def _moe_styles(decoder: Decoder, *, has_expert_mesh: bool) -> dict[str, Style]:
    """Styles by exact fqn, which go before a family's patterns: dense and sparse layers have the same names."""
    table = {**MOE_TABLE, "experts": Style.ELSEWHERE} if has_expert_mesh else MOE_TABLE
    layers = [fqn for fqn, module in decoder.named_modules() if isinstance(module, MoE)]
    return {f"{fqn}.{name}".removesuffix("."): style for fqn in layers for name, style in table.items()}


def _split_over_ep(decoder: Decoder, job: Job, meshes: Meshes) -> Mapping[str, SourceLayout]:
    topology = meshes.topology
    if not topology.has_expert_mesh or meshes.fsdp_moe_mesh is None:
        return {}
    plan = plan_expert_parallel(
        decoder,
        ep_size=topology.ep_size,
        tp_size=topology.tp_size,
        is_sequence_parallel=job.accelerator.sequence_parallel,
    )
    ep_mesh = meshes.fsdp_moe_mesh["ep"]
    dispatcher = build_dispatcher(
        job.dist_config.ep_dispatcher,
        ep_mesh.get_group(),
        is_exchange_kept=not job.activation_checkpoint.recompute_exchange,
    )
    apply_expert_parallel(decoder, plan, dispatcher, ep_mesh=ep_mesh, tp_mesh=meshes.fsdp_non_moe_mesh["tp"])
    return {fqn: SourceLayout("ep", placement) for fqn, placement in plan.placements.items()}


def _plan_pipeline(decoder: Decoder, job: Job) -> PipelinePlan:
    plan = plan_pipeline(
        job.accelerator.pp_schedule,
        pp_size=job.accelerator.pp_size,
        num_layers=len(decoder.layers),
        costs=measure_costs(decoder),
        pp_layers=job.accelerator.pp_layers,
    )
    logger.info(plan.describe())
    return plan


def _choose_token_loss(job: Job, tp_mesh: DeviceMesh) -> TokenLoss | None:
    """The loss that the job asks for in place of the plain one that the model was built with; None keeps that."""
    accelerator, chunk_size = job.accelerator, job.training.loss_chunk_size
    if accelerator.loss_parallel and tp_mesh.size() > 1:
        return VocabParallelLoss(tp_mesh, is_sequence_parallel=accelerator.sequence_parallel, chunk_size=chunk_size)
    return None if chunk_size is None else ChunkedLoss(chunk_size)


def _is_sequence_parallel(job: Job, meshes: Meshes) -> bool:
    return job.accelerator.sequence_parallel and meshes.topology.tp_size > 1
