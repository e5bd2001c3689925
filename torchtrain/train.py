"""The training entry point: ``python -m torchtrain.train JOB.yaml --a.b=c``.

A composition root: one of the few files that see both the run and the model zoo. The job is checked before torch is
imported, so a wrong one is refused in a second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models.registry import fsdpturbo_models, load_spec, resolve_architecture, unsupported_techniques
from torchtrain.config.availability import find_unavailable
from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.job import Job
from torchtrain.config.load import collect_faults, read_job
from torchtrain.config.overrides import find_override_warnings
from torchtrain.config.rules import find_job_faults, find_size_faults
from torchtrain.distributed.fsdpturbo.legality import find_plugin_faults
from torchtrain.distributed.legality import find_legality_faults, find_model_warnings
from torchtrain.distributed.topology import Topology, fewest_ranks, find_topology_faults, find_topology_warnings
from torchtrain.errors import ConfigError, Fault, TorchtrainError
from torchtrain.kernels.plugins import find_kernel_faults
from torchtrain.runtime.env import LaunchEnv, read_launch_env

_USAGE = """\
usage: python -m torchtrain.train JOB.yaml [--section.key=value ...]
       ./run_train.sh [JOB.yaml] [--section.key=value ...]

Train a job, a YAML or TOML file. Any key of it can be changed on the command line, as in --training.steps=50.
Several ranks: NGPU=4 ./run_train.sh, or torchrun.

Every key with its default: docs/config_reference.md. First steps: docs/guides/quickstart.md.
The job as it would run, checked: torchtrain config JOB.yaml [--section.key=value ...]"""

_NO_JOB_FILE = Fault(
    "job file",
    None,
    "must be named, since dataset.sources has no default",
    "write it before any override, as in train_configs/llama/debug.yaml --training.steps=50",
)
_SECONDS_FOR_RANK_0_TO_SPEAK = 5.0


@dataclass(frozen=True)
class CheckedJob:
    """A job that may run, with what was derived from it on the way."""

    job: Job
    topology: Topology
    architecture: Any
    """The family's architecture: the preset with the job's overrides."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the job, then train it.

    Args:
        argv: Job file, then overrides, or ``--help``; the process's own arguments by default.

    Returns:
        The process's exit code: 0 finished, 1 the last checkpoint could not be written or another rank is lost, 2 the
        job is wrong, 3 training stopped itself, 143 stopped by a signal, its state saved if there was any yet.
    """
    words = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(words):
        print(_USAGE)
        return 0
    launch = LaunchEnv()
    try:
        launch = read_launch_env()
        checked = check_job(words, launch.world_size)
        if launch.rank == 0:
            for warning in find_override_warnings(_split_words(words)[1]):
                print(f"warning: {warning}", file=sys.stderr, flush=True)
        # Only now: importing torch takes seconds, and a wrong job has been refused already.
        from torchtrain.trainer.assembly import train
        from torchtrain.trainer.preflight import refuse_foreign_weights, refuse_what_the_model_rules_out

        spec = load_spec(checked.job.model.name)
        refuse_what_the_model_rules_out(checked.job, spec, checked.architecture)
        refuse_foreign_weights(checked.job, spec, checked.architecture)
    except TorchtrainError as error:
        # Every rank has read the same files: one of them says what is wrong.
        if launch.rank == 0:
            _say(error, launch)
        else:
            # A launcher ends all ranks as soon as one has ended: let rank 0 speak first, however busy the machine.
            time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)
        return error.exit_code
    try:
        return train(checked.job, checked.topology, spec, checked.architecture, launch)
    except TorchtrainError as error:
        # From here on an error may be this rank's own.
        _say(error, launch)
        return error.exit_code


def _say(error: TorchtrainError, launch: LaunchEnv) -> None:
    where = f"[rank {launch.rank}] " if launch.world_size > 1 else ""
    print(f"{where}error: {error}", file=sys.stderr, flush=True)


def check_job(argv: Sequence[str], world_size: int) -> CheckedJob:
    """Read and check a job, without torch.

    Args:
        argv: Job file, then overrides.
        world_size: Ranks that would train it.

    Raises:
        ConfigError: All faults of the file, the overrides, the model and the topology together.
    """
    path, overrides = _split_words(argv)
    reading = read_job(path, overrides)
    job = reading.job
    architecture, architecture_faults = _check_architecture(job)
    # Of two faults of one value the first is told: the topology knows more of the batch than the job alone.
    faults = collect_faults(
        reading,
        find_unavailable(job),
        find_topology_faults(job, world_size, num_experts=getattr(architecture, "num_experts", 0)),
        find_job_faults(job),
        find_kernel_faults(job.kernel_config, job.accelerator.device),
        of_model=architecture_faults,
    )
    if path is None:
        faults = [_NO_JOB_FILE if fault.path == "dataset.sources" and not fault.value else fault for fault in faults]
    if faults:
        raise ConfigError(faults)
    return CheckedJob(job, Topology.resolve(job, world_size), architecture)


def count_fewest_ranks(argv: Sequence[str]) -> int:
    """Count the ranks that a job needs at least, as far as it can be read.

    Args:
        argv: Job file, then overrides.

    Raises:
        ConfigError: The file itself cannot be read.
    """
    return fewest_ranks(read_job(*_split_words(argv)).job)


def find_warnings(argv: Sequence[str], checked: CheckedJob) -> list[str]:
    """Name what is legal but does nothing, or not what one expects, in the words of the command line and in the job."""
    return [
        *find_override_warnings(_split_words(argv)[1]),
        *find_job_warnings(checked.job),
        *find_model_warnings(checked.architecture, checked.job),
        *find_topology_warnings(checked.job, checked.topology),
    ]


def _split_words(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The job file, if it is named, and the overrides."""
    return (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)


def find_late_errors(checked: CheckedJob) -> list[TorchtrainError]:
    """Find what a run would refuse next, as far as this machine can tell without ranks: by the model and the files.

    Imports torch.
    """
    from torchtrain.trainer.preflight import (
        find_file_errors,
        refuse_foreign_weights,
        refuse_what_the_model_rules_out,
    )

    spec, errors = load_spec(checked.job.model.name), []
    for refuse in (refuse_what_the_model_rules_out, refuse_foreign_weights):
        try:
            refuse(checked.job, spec, checked.architecture)
        except TorchtrainError as error:
            errors.append(error)
    return [*errors, *find_file_errors(checked.job)]


def describe_kernels(checked: CheckedJob) -> str:
    """Say in a comment of a job file which backends this machine would take; nothing where it cannot. Imports torch."""
    from torchtrain.trainer.preflight import describe_kernels

    try:
        return describe_kernels(checked.job, load_spec(checked.job.model.name), checked.architecture)
    except ConfigError:
        return ""


def _check_architecture(job: Job) -> tuple[Any, list[Fault]]:
    model, seq_len = job.model, job.training.seq_len
    try:
        architecture = resolve_architecture(model.name, model.preset, model.overrides)
    except ConfigError as error:
        return None, list(error.faults)
    faults = []
    if not find_size_faults(job):
        unsupported = unsupported_techniques(model.name)
        faults += find_legality_faults(architecture, job, family=model.name, unsupported=unsupported)
        registered = fsdpturbo_models()
        faults += find_plugin_faults(
            job, family=model.name, registered=registered.get(model.name), registered_families=tuple(registered)
        )
    longest = architecture.max_position_embeddings
    if seq_len <= longest:
        return architecture, faults
    rule = f"must not exceed the model's max_position_embeddings = {longest}"
    fix = f"use {longest} or fewer, or raise model.overrides.max_position_embeddings"
    return architecture, [*faults, Fault("training.seq_len", seq_len, rule, fix)]


if __name__ == "__main__":
    sys.exit(main())
