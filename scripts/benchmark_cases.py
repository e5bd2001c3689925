"""What a benchmark runs: the cases of a sweep file, or of a command line, as commands to start.

A sweep file is YAML. What stands at the top holds for every case; a case may have a job and a number of ranks of its
own, and its ``set`` comes after the common one:

    job: train_configs/llama/debug.yaml     # from where you stand, as on a command line
    ranks: 2
    steps: 30
    runs: 5
    warmup_steps: 5
    set: [fsdp_config.dp_shard_size=2]
    cases:
      - {label: bare fully_shard, baseline: bare}
      - {label: fused, set: [fsdp_config.comm_fusion=true]}

Not for timing them: that is ``benchmark.py``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from torchtrain.config.explain import explain
from torchtrain.config.files import read_mapping
from torchtrain.config.job import Job
from torchtrain.config.nearest import did_you_mean
from torchtrain.config.schema import value_at
from torchtrain.config.section import Section
from torchtrain.errors import ConfigError, Fault, FaultsError
from torchtrain.train import check_job

_BARE_SCRIPT = Path(__file__).with_name("bare_fully_shard.py")
_QUIET = ("--checkpoint.interval=0", "--checkpoint.save_final=false", "--checkpoint.resume=null")
_QUIET += ("--task.eval_interval=0", "--task.sample_prompt=null", "--metrics.console=plain")

# What the loop of bare_fully_shard.py does not do, and the value with which a job does not ask for it.
PLAIN: dict[str, Any] = {f"accelerator.{axis}_size": 1 for axis in ("tp", "cp", "ep", "pp")}
PLAIN |= {"compile.enabled": False, "activation_checkpoint.mode": "none", "fsdp_config.replicate_params": ()}
PLAIN |= {"optimizer._target_": "torch.optim.AdamW", "optimizer.options": {}, "optimizer.fp32_main_params": False}
PLAIN |= {"training.loss_chunk_size": None, "fsdp_config.enable_offload": False}
PLAIN |= {"fsdp_config.mix_precision.fp32_main_grad": False}
PLAIN |= {f"fsdp_config.{key}": True for key in ("reshard_after_backward", "requires_grad_sync")}
PLAIN |= {f"fsdp_config.{way}_prefetch_depth": 1 for way in ("forward", "backward")}


@dataclass(frozen=True, kw_only=True)
class SweepCase(Section):
    """One case of a sweep."""

    label: str
    """What the tables call it."""
    job: str | None = None
    """Job file; null takes the sweep's."""
    ranks: int | None = None
    """Processes on this node; null takes the sweep's."""
    set: tuple[str, ...] = ()
    """Overrides of this case only."""
    baseline: Literal["bare"] | None = None
    """``bare``: the job's model in a plain loop under bare ``fully_shard``."""


@dataclass(frozen=True, kw_only=True)
class Sweep(Section):
    """Cases to time in one go; ratios are to the first."""

    cases: tuple[SweepCase, ...]
    job: str | None = None
    """Job file of the cases that name none."""
    ranks: int = 1
    """Processes on this node."""
    steps: int = 30
    """Steps of each run."""
    runs: int = 3
    """Runs of each case."""
    warmup_steps: int = 5
    """First steps left out of tokens/s."""
    set: tuple[str, ...] = ()
    """Overrides of every case."""


@dataclass(frozen=True)
class Case:
    """Something to time."""

    label: str
    command: tuple[str, ...]
    """Takes ``--training.output_dir=FOLDER`` as a last word."""
    tokens_per_step: int
    ranks: int = 1
    reports_on_stdout: bool = False
    """Its step reports are lines on stdout; others write ``FOLDER/metrics.jsonl``."""


class SweepError(FaultsError):
    """A sweep, or a job in it, that cannot be timed as it stands."""

    heading = "the benchmark is wrong"


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        SweepError: The file cannot be read, or all in it that is no key or no value of one.
    """
    try:
        mapping = read_mapping(path, named_by="sweep file")
        return TypeAdapter(Sweep).validate_json(json.dumps(mapping))
    except ConfigError as error:
        raise SweepError(error.faults) from None
    except ValidationError as error:
        raise SweepError(map(_explain, error.errors(include_url=False))) from None


def _explain(detail: Any) -> Fault:
    if detail["type"] != "unexpected_keyword_argument":
        return explain(detail)
    section = SweepCase if detail["loc"][0] == "cases" and len(detail["loc"]) > 1 else Sweep
    known = [field.name for field in fields(section)]
    path = ".".join(map(str, detail["loc"]))
    return Fault(path, detail["input"], "is not a key of a sweep", did_you_mean(str(detail["loc"][-1]), known))


def build_cases(sweep: Sweep) -> list[Case]:
    """Turn every case of a sweep into a command.

    Raises:
        SweepError: All that is wrong with the sweep, or else with its jobs; a fault that not every case has is headed
            by the labels of those that do.
    """
    if faults := list(_find_faults(sweep)):
        raise SweepError(faults)
    cases: list[Case] = []
    found: dict[str, tuple[Fault, list[str]]] = {}
    for case in sweep.cases:
        try:
            cases.append(
                build_case(
                    case.job or sweep.job or "",
                    [*sweep.set, *case.set],
                    label=case.label,
                    ranks=case.ranks or sweep.ranks,
                    steps=sweep.steps,
                    is_bare=case.baseline == "bare",
                )
            )
        except ConfigError as error:
            for fault in error.faults:
                found.setdefault(str(fault), (fault, []))[1].append(case.label)
    if found:
        raise SweepError(
            fault if len(labels) == len(sweep.cases) else _headed(fault, labels) for fault, labels in found.values()
        )
    return cases


def build_case(
    job_path: str, overrides: Sequence[str], *, label: str, ranks: int, steps: int, is_bare: bool = False
) -> Case:
    """Turn a job into a command.

    Raises:
        ConfigError: The job is wrong, or asks for what a bare loop does not do.
    """
    words = [*_QUIET, f"--training.steps={steps}", *(f"--{override}" for override in overrides)]
    job = check_job([job_path, *words], ranks).job
    if is_bare and (faults := list(_find_bare_faults(job))):
        raise ConfigError(faults)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = (str(_BARE_SCRIPT),) if is_bare else ("-m", "torchtrain.train")
    return Case(
        label=label,
        command=(*launcher, *program, job_path, *words),
        tokens_per_step=job.training.global_batch_size * job.training.seq_len,
        ranks=ranks,
        reports_on_stdout=is_bare,
    )


def _find_bare_faults(job: Job) -> Iterator[Fault]:
    rule = "is not done by a loop under bare fully_shard, so that the comparison would not be fair"
    for path, plain in PLAIN.items():
        if (value := value_at(job, path)) != plain:
            shown = list(plain) if isinstance(plain, tuple) else plain
            yield Fault(path, value, rule, f"set {path}={json.dumps(shown)} for both sides")


def _headed(fault: Fault, labels: Sequence[str]) -> Fault:
    return Fault(f"{', '.join(labels)}: {fault.path}", fault.value, fault.rule, fault.fix)


def _find_faults(sweep: Sweep) -> Iterator[Fault]:
    sizes = {"ranks": sweep.ranks, "runs": sweep.runs, "warmup_steps": sweep.warmup_steps}
    sizes |= {f"cases.{i}.ranks": case.ranks for i, case in enumerate(sweep.cases) if case.ranks is not None}
    for path, size in sizes.items():
        if size < 1:
            yield Fault(path, size, "must be at least 1", "use 1 or more")
    if sweep.steps <= max(sweep.warmup_steps, 0):
        rule = f"must exceed warmup_steps = {sweep.warmup_steps}"
        yield Fault("steps", sweep.steps, rule, f"use {max(sweep.warmup_steps, 0) + 1} or more")
    if not sweep.cases:
        yield Fault("cases", [], "must name at least one case", "write for example [{label: as it is}]")
    first_with: dict[str, int] = {}
    for index, case in enumerate(sweep.cases):
        first = first_with.setdefault(case.label, index)
        if first != index:
            rule = f"must differ from the label of cases.{first}"
            yield Fault(f"cases.{index}.label", case.label, rule, "give each case a label of its own")
        if not (case.job or sweep.job):
            fix = "name one there, or one for all cases at the top"
            yield Fault(f"cases.{index}.job", case.job, "must name a job file", fix)
    # A job file that is no file would be read as an override.
    words = {f"set.{i}": word for i, word in enumerate(sweep.set)}
    words |= {f"cases.{i}.set.{j}": word for i, case in enumerate(sweep.cases) for j, word in enumerate(case.set)}
    for path, word in words.items():
        if "=" not in word or word.startswith("-"):
            yield Fault(path, word, "must be KEY=VALUE", "write it as training.seq_len=128, without dashes")
