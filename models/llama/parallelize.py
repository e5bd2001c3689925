"""The order in which techniques are applied to a Llama: the only place that decides it."""

from __future__ import annotations

from torch import nn

from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.compile import apply_compile
from torchtrain.config.job import Job
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.meshes import Meshes


def parallelize_llama(model: nn.Module, job: Job, meshes: Meshes) -> tuple[nn.Module, ...]:
    """Apply activation checkpointing, then compile, then FSDP.

    Compile sees the checkpointed block, so that it can plan around the recomputation; FSDP comes last, because its
    hooks must gather parameters before anything, compiled or recomputed, reads them.
    """
    model = apply_activation_checkpoint(model, job.activation_checkpoint)
    model = apply_compile(model, job.compile)
    if meshes.topology.has_fsdp_domain:
        manager = FSDP2Manager(job.fsdp_config, meshes)
        model = manager.parallelize(model, manager.plan(model))
    return (model,)
