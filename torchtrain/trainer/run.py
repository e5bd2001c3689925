"""What every part of one run is built from, and the model built from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtrain.checkpoint.hf_import import ModelNames, import_weights, read_model_names
from torchtrain.config.job import Job
from torchtrain.distributed.fsdp2.main_grad import keep_gradients_in_fp32
from torchtrain.distributed.fsdp2.offload import check_host_memory, check_whole_builds, parameter_device
from torchtrain.distributed.fsdp2.precision import DTYPES
from torchtrain.distributed.materialize import initialize_parameters, materialize
from torchtrain.distributed.meshes import Meshes
from torchtrain.model_spec import ModelSpec
from torchtrain.nn.kernel_plan import KernelPlan
from torchtrain.runtime.logging import get_logger
from torchtrain.trainer.kernels import install_kernels, plan_job_kernels

logger = get_logger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
"""In ``training.output_dir``."""


@dataclass(frozen=True)
class Run:
    """What every part of one run is built from."""

    job: Job
    spec: ModelSpec
    architecture: Any
    meshes: Meshes
    is_main: bool

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.meshes.device

    @property
    def output_dir(self) -> Path:
        """Where the run leaves everything."""
        return Path(self.job.training.output_dir)


@dataclass(frozen=True)
class RankModel:
    """This rank's part of the model."""

    module: nn.Module
    """Owns every parameter of this rank under its global name; the whole model, or what is left of it under PP."""
    chunks: tuple[nn.Module, ...]
    """What is called, in the order of the pipeline; ``(module,)`` without one. They share ``module``'s parameters."""
    kernels: KernelPlan
    """Installed in it."""


def build_model(run: Run, *, is_loaded_later: bool = False) -> RankModel:
    """Build, parallelise and fill the model; drawn weights depend on the seed and the fqns alone.

    Args:
        run: What it is built from.
        is_loaded_later: A checkpoint will bring every value, so ``model.hf_path`` is left unread.

    Collective: the whole world.
    """
    model_config = run.job.model
    fsdp_config, has_fsdp_domain = run.job.fsdp_config, run.meshes.topology.has_fsdp_domain
    is_offloaded = fsdp_config.enable_offload and has_fsdp_domain
    if is_offloaded and not model_config.init_on_meta:
        with torch.device("meta"):
            check_whole_builds(run.spec.build(run.architecture), run.device)
    with torch.device("meta" if model_config.init_on_meta else run.device):
        model = run.spec.build(run.architecture)
    model = model.to(DTYPES[model_config.init_dtype])
    kernels = plan_job_kernels(model, run.job, device=run.device.type)
    install_kernels(model, kernels, folder=run.output_dir if run.is_main else None)
    names = read_model_names(model)
    chunks = run.spec.parallelize(model, run.job, run.meshes)
    if is_offloaded:
        check_host_memory(model, fp32_main_params=run.job.optimizer.fp32_main_params)
    if model_config.init_on_meta:
        home = parameter_device(fsdp_config, run.device, has_fsdp_domain=has_fsdp_domain)
        materialize(model, home, buffer_device=run.device)
    if fsdp_config.mix_precision.fp32_main_grad and not has_fsdp_domain:
        keep_gradients_in_fp32(model)
    _fill(run, model, names, is_loaded_later=is_loaded_later)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info(
        f"model {model_config.name}/{model_config.preset}: {num_parameters / 1e6:.2f} M parameters on this rank's stage"
    )
    return RankModel(model, chunks, kernels)


def _fill(run: Run, model: nn.Module, names: ModelNames, *, is_loaded_later: bool) -> None:
    """Load what ``model.hf_path`` holds, and draw the rest."""
    drawn, hf_path = None, run.job.model.hf_path
    if hf_path is not None and is_loaded_later:
        logger.info(f"{hf_path} is not read: the weights come from a checkpoint")
    elif hf_path is not None:
        drawn = import_weights(model, names, Path(hf_path), run.spec.hugging_face).initialised
    initialize_parameters(model, partial(run.spec.init_rule, run.architecture), run.job.training.seed, only=drawn)
