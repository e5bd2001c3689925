"""Settings that are legal but do nothing, or not what one expects, and the condition that is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtrain.config.job import Job
from torchtrain.config.schema import value_at


def find_job_warnings(job: Job) -> list[str]:
    """Name each such setting of a job, and what it needs."""
    warnings = [
        f"{row.path} = {_as_yaml(value)} has no effect: it needs {row.needs}"
        for row in _NEEDS
        if row.is_set(value := value_at(job, row.path)) and not row.has_effect(job)
    ]
    if job.model.init_dtype != "float32" and not job.optimizer.fp32_main_params:
        warnings.append(
            f"model.init_dtype = {job.model.init_dtype} keeps the optimizer's state in that dtype too, so small "
            "updates are lost: set optimizer.fp32_main_params and fsdp_config.mix_precision.fp32_main_grad, or prefer "
            "float32 here and the low precision in fsdp_config.mix_precision.param_dtype"
        )
    if job.lr_scheduler.warmup_steps > job.training.steps:
        warnings.append(
            f"lr_scheduler.warmup_steps = {job.lr_scheduler.warmup_steps} outlasts training.steps = "
            f"{job.training.steps}: the learning rate never reaches optimizer.lr"
        )
    if job.dataset.holdout_fraction > 0 and job.task.eval_interval == 0:
        warnings.append("dataset.holdout_fraction keeps data from training that nothing reads: task.eval_interval is 0")
    return warnings


@dataclass(frozen=True)
class _Need:
    """A setting that does something only under a condition."""

    path: str
    is_set: Callable[[Any], bool]
    has_effect: Callable[[Job], bool]
    needs: str


def _differs(from_value: object) -> Callable[[Any], bool]:
    return lambda value: value != from_value


def _has_experts(job: Job) -> bool:
    return job.accelerator.ep_size > 1 or (job.dist_config.ep_size or 1) > 1


def _has_stages(job: Job) -> bool:
    return job.accelerator.pp_size > 1


def _has_tp(job: Job) -> bool:
    return job.accelerator.tp_size > 1


def _as_yaml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | tuple | list) else str(value)


_NEEDS = (
    _Need("fsdp_config.edp_shard_size", _differs(1), _has_experts, "accelerator.ep_size > 1 and a model with experts"),
    _Need(
        "fsdp_config.mix_precision.cast_forward_inputs",
        _differs(True),
        lambda job: job.fsdp_config.mix_precision.param_dtype is not None,
        "fsdp_config.mix_precision.param_dtype",
    ),
    _Need(
        "fsdp_config.comm_fusion_zero_copy",
        _differs(None),
        lambda job: job.fsdp_config.comm_fusion,
        "fsdp_config.comm_fusion: true",
    ),
    _Need(
        "accelerator.cp_mode", _differs("ulysses"), lambda job: job.accelerator.cp_size > 1, "accelerator.cp_size > 1"
    ),
    _Need("accelerator.pp_schedule", _differs("1F1B"), _has_stages, "accelerator.pp_size > 1"),
    _Need("accelerator.pp_micro_batch_size", _differs(None), _has_stages, "accelerator.pp_size > 1"),
    _Need("accelerator.pp_layers", _differs(None), _has_stages, "accelerator.pp_size > 1"),
    _Need("accelerator.sequence_parallel", _differs(False), _has_tp, "accelerator.tp_size > 1"),
    _Need("accelerator.loss_parallel", _differs(False), _has_tp, "accelerator.tp_size > 1"),
    _Need("dist_config.ep_dispatcher", _differs("eager"), _has_experts, "accelerator.ep_size > 1"),
    _Need(
        "dist_config.hook_modules",
        lambda patterns: bool(patterns),
        lambda job: job.dist_config.fsdp_implementation == "custom" or job.dist_config.name != "fsdpturbo",
        "dist_config.fsdp_implementation: custom",
    ),
    _Need(
        "checkpoint.export_dtype", _differs(None), lambda job: job.checkpoint.export_hf, "checkpoint.export_hf: true"
    ),
    _Need(
        "checkpoint.export_max_file_gb",
        _differs(5.0),
        lambda job: job.checkpoint.export_hf,
        "checkpoint.export_hf: true",
    ),
    _Need("compile.fullgraph", _differs(False), lambda job: job.compile.enabled, "compile.enabled: true"),
    _Need("compile.dynamic", _differs(None), lambda job: job.compile.enabled, "compile.enabled: true"),
    _Need(
        "activation_checkpoint.every_n_blocks",
        _differs(2),
        lambda job: job.activation_checkpoint.mode == "every_nth_block",
        "activation_checkpoint.mode: every_nth_block",
    ),
    _Need("activation_checkpoint.recompute_exchange", _differs(False), _has_experts, "accelerator.ep_size > 1"),
    _Need(
        "checkpoint.async_save",
        _differs(False),
        lambda job: job.checkpoint.interval > 0 or job.checkpoint.save_final,
        "checkpoint.interval > 0 or checkpoint.save_final: true",
    ),
    _Need(
        "lr_scheduler.decay_steps",
        _differs(None),
        lambda job: job.lr_scheduler.name == "wsd",
        "lr_scheduler.name: wsd",
    ),
    _Need(
        "lr_scheduler.min_lr_ratio",
        _differs(0.1),
        lambda job: job.lr_scheduler.name != "constant",
        "an lr_scheduler.name other than constant",
    ),
)
