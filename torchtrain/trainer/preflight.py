"""What can be known to be wrong with a checked job before a process group exists: by its model, and by its files.

Not for rules of the job alone (``config.rules``), nor for what only a rank can tell, such as its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtrain.checkpoint.checkpointer import find_resumable, refuse_damaged
from torchtrain.checkpoint.hf_export import find_target_faults
from torchtrain.checkpoint.hf_folder import config_file_of, open_folder, read_config
from torchtrain.checkpoint.hf_import import plan_folder_import, read_model_names
from torchtrain.config.job import Job
from torchtrain.data.sources import list_files
from torchtrain.data.tokenizer import build_tokenizer
from torchtrain.distributed.fsdp2.replicate import resolve_replicate_params
from torchtrain.errors import ConfigError, Fault, TorchtrainError
from torchtrain.hugging_face.model_config import ConfigComparison, compare_config, find_export_faults
from torchtrain.model_spec import ModelSpec
from torchtrain.optim.build import check_optimizer
from torchtrain.runtime.device import device_kind
from torchtrain.trainer.export import HUGGING_FACE_FOLDER
from torchtrain.trainer.kernels import comment_on, plan_job_kernels
from torchtrain.trainer.run import CHECKPOINTS_FOLDER


def refuse_what_the_model_rules_out(job: Job, spec: ModelSpec, architecture: Any) -> None:
    """Hold the keys that speak of parameters to the model, on the meta device; the same outcome on every rank.

    Raises:
        ConfigError: All faults of ``optimizer``, ``fsdp_config.replicate_params`` and ``kernel_config``, whatever the
            topology.
    """
    with torch.device("meta"):
        model = spec.build(architecture)
    faults: list[Fault] = []
    for check in (
        partial(check_optimizer, model, job.optimizer, trusted_targets=job.trusted_targets),
        partial(resolve_replicate_params, model, job.fsdp_config.replicate_params),
        partial(plan_job_kernels, model, job, device=device_kind(job.accelerator.device)),
    ):
        try:
            check()
        except ConfigError as error:
            faults += error.faults
    if job.checkpoint.export_hf:
        faults += find_export_faults(architecture, spec.hugging_face.config)
        faults += find_target_faults(Path(job.training.output_dir) / HUGGING_FACE_FOLDER, "training.output_dir")
    if faults:
        raise ConfigError(faults)


def describe_kernels(job: Job, spec: ModelSpec, architecture: Any) -> str:
    """Say in a comment of a job file which backends this machine would take.

    Raises:
        ConfigError: ``kernel_config`` cannot be done.
    """
    with torch.device("meta"):
        model = spec.build(architecture)
    return comment_on(plan_job_kernels(model, job, device=device_kind(job.accelerator.device)))


def refuse_foreign_weights(job: Job, spec: ModelSpec, architecture: Any) -> None:
    """Hold the checkpoint that ``model.hf_path`` names to the model, by its config, index and headers.

    A run that goes on from a checkpoint of its own needs none of it: only a config that is there is compared.

    Raises:
        ConfigError: Its config differs from the job's architecture; every difference is listed.
        WeightsError: It is damaged, lacks tensors, or has others than the model.
    """
    if job.model.hf_path is None:
        return
    path = Path(job.model.hf_path)
    is_resumed = find_resumable(job.checkpoint, Path(job.training.output_dir) / CHECKPOINTS_FOLDER) is not None
    if is_resumed and not config_file_of(path).is_file():
        return
    folder = None if is_resumed else open_folder(path)
    comparison = _compare(path, job, spec, architecture)
    if comparison.faults:
        raise ConfigError(comparison.faults)
    if folder is None:
        return
    with torch.device("meta"):
        names = read_model_names(spec.build(architecture))
    plan_folder_import(names, folder, spec.hugging_face)


def describe_config_differences(job: Job, spec: ModelSpec, architecture: Any) -> tuple[str, ...]:
    """Say in what the job departs from the config of ``model.hf_path`` where that is allowed."""
    path = None if job.model.hf_path is None else Path(job.model.hf_path)
    # A resumed run may do without; any other has been refused by now.
    if path is None or not config_file_of(path).is_file():
        return ()
    return _compare(path, job, spec, architecture).notes


def _compare(path: Path, job: Job, spec: ModelSpec, architecture: Any) -> ConfigComparison:
    return compare_config(
        read_config(path),
        architecture,
        spec.hugging_face.config,
        overridden=job.model.overrides,
        where=str(config_file_of(path)),
        preset=job.model.preset,
        presets=spec.presets,
    )


def find_file_errors(job: Job) -> Iterator[TorchtrainError]:
    """Look for the data, the tokenizer and the checkpoint that a job names; yield an error for each that is no good.

    A run says the same when it opens them; other nodes may have other disks.
    """
    looks = [partial(list_files, source) for source in job.dataset.sources]
    for look in (*looks, partial(build_tokenizer, job.tokenizer), partial(refuse_damaged, job.checkpoint.resume)):
        try:
            look()
        except TorchtrainError as error:
            yield error
