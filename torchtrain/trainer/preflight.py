"""What can be known to be wrong with a checked job before a process group exists: by its model, and by its files.

Not for rules of the job alone (``config.rules``), nor for what only a rank can tell, such as its device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from torchtrain.checkpoint.checkpointer import refuse_damaged
from torchtrain.config.job import Job
from torchtrain.data.sources import list_files
from torchtrain.data.tokenizer import build_tokenizer
from torchtrain.distributed.fsdp2.replicate import resolve_replicate_params
from torchtrain.errors import ConfigError, Fault, TorchtrainError
from torchtrain.model_spec import ModelSpec
from torchtrain.optim.build import check_optimizer


def refuse_what_the_model_rules_out(job: Job, spec: ModelSpec, architecture: Any) -> None:
    """Hold the keys that speak of parameters to the model, on the meta device; the same outcome on every rank.

    Raises:
        ConfigError: All faults of ``optimizer`` and of ``fsdp_config.replicate_params``, whatever the topology.
    """
    with torch.device("meta"):
        model = spec.build(architecture)
    faults: list[Fault] = []
    for check in (
        partial(check_optimizer, model, job.optimizer, trusted_targets=job.trusted_targets),
        partial(resolve_replicate_params, model, job.fsdp_config.replicate_params),
    ):
        try:
            check()
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)


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
