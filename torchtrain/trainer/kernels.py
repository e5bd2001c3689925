"""The backends of one run: planned from the job, installed, told and written down."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from torchtrain.config.dump import dump_job
from torchtrain.config.job import Job
from torchtrain.distributed.fsdp2.precision import DTYPES
from torchtrain.nn.kernel_plan import KernelPlan, apply_kernels, plan_kernels
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

KERNELS_FILE = "kernels.json"


def plan_job_kernels(model: nn.Module, job: Job, *, device: str) -> KernelPlan:
    """Choose the backends of a job's model, for the dtype in which its layers compute.

    Raises:
        ConfigError: See ``plan_kernels``.
    """
    dtype = DTYPES[job.fsdp_config.mix_precision.param_dtype or job.model.init_dtype]
    assert dtype is not None, "a named dtype is one"
    return plan_kernels(model, job.kernel_config, device=device, dtype=dtype)


def dump_resolved_job(job: Job, plan: KernelPlan) -> str:
    """Write a job with every default as YAML, the backends that ``kernel_config`` came down to as a comment."""
    return dump_job(job) + comment_on(plan)


def comment_on(plan: KernelPlan) -> str:
    """Say what was chosen as a line of a job file, which reads it as nothing."""
    return f"# kernels on {plan.device} in {plan.dtype}: {plan.describe()}\n"


def install_kernels(model: nn.Module, plan: KernelPlan, *, folder: Path | None) -> nn.Module:
    """Install backends in a model that is not sharded yet, and say which they are.

    Args:
        model: The whole model.
        plan: For this model.
        folder: Where to leave ``kernels.json``; ``None`` writes nothing.
    """
    logger.info(f"kernels: {plan.describe()}")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / KERNELS_FILE).write_text(json.dumps(plan.to_mapping(), indent=2) + "\n", encoding="utf-8")
    return apply_kernels(model, plan)
