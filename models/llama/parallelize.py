"""The order in which techniques are applied to a Llama: the only place that decides it."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.compile import apply_compile
from torchtrain.config.job import Job
from torchtrain.distributed.context_parallel.apply import apply_context_parallel
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.fsdp2.source_layout import SourceLayout
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.pipeline_parallel.split import measure_costs, split_into_stages
from torchtrain.distributed.pipeline_parallel.stage_plan import PipelinePlan, plan_pipeline
from torchtrain.distributed.tensor_parallel.apply import apply_tensor_parallel
from torchtrain.distributed.tensor_parallel.plan import Style, TensorParallelPlan, plan_tensor_parallel
from torchtrain.distributed.tensor_parallel.vocabulary_loss import VocabParallelLoss
from torchtrain.losses.linear_cross_entropy import ChunkedLoss
from torchtrain.nn.decoder import Decoder, TokenLoss
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

TENSOR_PARALLEL_TABLE = {
    "embed_tokens": Style.EMBEDDING,
    "layers.*.self_attn": Style.WHOLE_INPUT,
    "layers.*.self_attn.[qkv]_proj": Style.COLUMN,
    "layers.*.self_attn.o_proj": Style.ROW,
    "layers.*.mlp": Style.WHOLE_INPUT,
    "layers.*.mlp.gate_proj": Style.COLUMN,
    "layers.*.mlp.up_proj": Style.COLUMN,
    "layers.*.mlp.down_proj": Style.ROW,
    "layers.*_layernorm": Style.NORM,
    "norm": Style.NORM,
    "lm_head": Style.HEAD,
}
"""What tensor parallelism makes of a Llama's modules."""


def parallelize_llama(model: nn.Module, job: Job, meshes: Meshes) -> tuple[nn.Module, ...]:
    """Apply tensor parallelism, context parallelism, activation checkpointing, compile, then FSDP.

    Tensor parallelism comes first, because what follows must see the layers as they compute. Compile sees the
    checkpointed block, so that it can plan around the recomputation; FSDP comes last, because its hooks must gather
    parameters before anything, compiled or recomputed, reads them.
    """
    tp_plan, tp_mesh = None, meshes.fsdp_non_moe_mesh["tp"]
    if meshes.topology.tp_size > 1:
        tp_plan = plan_tensor_parallel(
            model,
            TENSOR_PARALLEL_TABLE,
            tp_size=meshes.topology.tp_size,
            is_sequence_parallel=job.accelerator.sequence_parallel,
        )
        model = apply_tensor_parallel(model, tp_plan, tp_mesh)
    if meshes.topology.cp_size > 1:
        model = apply_context_parallel(model, job.accelerator.cp_mode, meshes.device_mesh["cp"])
    token_loss = _choose_token_loss(job, tp_mesh)
    if token_loss is not None:
        cast(Decoder, model).token_loss = token_loss
    model = apply_activation_checkpoint(model, job.activation_checkpoint)
    model = apply_compile(model, job.compile)
    manager = FSDP2Manager(job.fsdp_config, meshes)
    shards = manager.plan(model, _source_layouts(tp_plan)) if meshes.topology.has_fsdp_domain else None
    if meshes.topology.pp_size == 1:
        if shards is not None:
            manager.parallelize(model, shards)
        return (model,)
    stages = split_into_stages(cast(Decoder, model), _plan_pipeline(cast(Decoder, model), job), meshes.pp_rank)
    if shards is not None:
        for stage in stages:
            manager.parallelize(stage, manager.plan_stage(shards, stage))
    return stages


def _plan_pipeline(model: Decoder, job: Job) -> PipelinePlan:
    plan = plan_pipeline(
        job.accelerator.pp_schedule,
        pp_size=job.accelerator.pp_size,
        num_layers=len(model.layers),
        costs=measure_costs(model),
        pp_layers=job.accelerator.pp_layers,
    )
    logger.info(plan.describe())
    return plan


def _source_layouts(plan: TensorParallelPlan | None) -> dict[str, SourceLayout]:
    placements = {} if plan is None else plan.placements
    return {fqn: SourceLayout("tp", placement) for fqn, placement in placements.items()}


def _choose_token_loss(job: Job, tp_mesh: DeviceMesh) -> TokenLoss | None:
    """The loss that the job asks for in place of the plain one that the model was built with; None keeps that."""
    accelerator, chunk_size = job.accelerator, job.training.loss_chunk_size
    if accelerator.loss_parallel and tp_mesh.size() > 1:
        return VocabParallelLoss(tp_mesh, is_sequence_parallel=accelerator.sequence_parallel, chunk_size=chunk_size)
    return None if chunk_size is None else ChunkedLoss(chunk_size)
