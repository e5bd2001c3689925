"""Read a job: file and overrides in, one frozen `Job` out, every fault reported together.

Not for what the values must satisfy between them: that is `rules`, `availability` and the topology.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from torchtrain.config.explain import explain
from torchtrain.config.files import Mapping, read_mapping
from torchtrain.config.job import Job
from torchtrain.config.overrides import apply_overrides
from torchtrain.config.rules import find_job_faults
from torchtrain.errors import ConfigError, Fault

_ADAPTER = TypeAdapter(Job)
Location = tuple[int | str, ...]


@dataclass(frozen=True)
class JobReading:
    """A job as far as it could be read."""

    job: Job
    """Values that could not be read hold their default."""
    faults: tuple[Fault, ...]
    """What could not be read."""


def read_job(path: str | Path | None, overrides: Sequence[str] = ()) -> JobReading:
    """Read a job file and its overrides as far as possible.

    Args:
        path: YAML or TOML file; None starts from the defaults.
        overrides: Command-line words, see `apply_overrides`.

    Returns:
        The job, unreadable values replaced by their defaults so that all later rules still run, and their faults.

    Raises:
        ConfigError: The file itself cannot be read.
    """
    mapping = {} if path is None else read_mapping(Path(path))
    faults = apply_overrides(mapping, overrides)
    job, invalid = _validate(mapping)
    return JobReading(job, (*faults, *invalid))


def load_job(path: str | Path | None, overrides: Sequence[str] = ()) -> Job:
    """Read a job and check it against every rule that needs only the job.

    Raises:
        ConfigError: All faults of the job.
    """
    reading = read_job(path, overrides)
    faults = collect_faults(reading, find_job_faults(reading.job))
    if faults:
        raise ConfigError(faults)
    return reading.job


def collect_faults(reading: JobReading, *later: Iterable[Fault], of_model: Iterable[Fault] = ()) -> list[Fault]:
    """Join the faults of a reading with those of later rules.

    Later faults that only restate an unreadable value, because a default stood in for it, are left out. Of several that
    later rules find with one value the first is kept.

    Args:
        reading: What was read.
        *later: The faults of each later rule.
        of_model: Those by the model, last. One stands beside another fault of its value, as a value may fit neither the
            model nor the world, unless that says the same rule or the same way out.
    """
    unread = [fault.path for fault in reading.faults]
    faults = list(reading.faults)
    for fault in (fault for group in later for fault in group):
        is_told = any((known.path, known.value) == (fault.path, fault.value) for known in faults)
        if not is_told and not any(_follows_from(fault, path) for path in unread):
            faults.append(fault)
    for fault in of_model:
        told = [known for known in faults if (known.path, known.value) == (fault.path, fault.value)]
        is_told = any(fault.rule in known.rule or fault.fix == known.fix for known in told)
        if not is_told and not any(_follows_from(fault, path) for path in unread):
            faults.append(fault)
    return faults


def _follows_from(fault: Fault, unread_path: str) -> bool:
    is_same_branch = f"{fault.path}.".startswith(f"{unread_path}.") or f"{unread_path}.".startswith(f"{fault.path}.")
    return is_same_branch or unread_path in fault.rule


def _validate(mapping: Mapping) -> tuple[Job, list[Fault]]:
    """Validate, and again without what was wrong, until what is left is a job."""
    tree = json.loads(json.dumps(mapping))
    faults: list[Fault] = []
    while True:
        try:
            # Through JSON, where strict mode takes an integer for a number and a list for a tuple, and nothing else.
            return _ADAPTER.validate_json(json.dumps(tree)), faults
        except ValidationError as error:
            details = error.errors(include_url=False)
        # What was taken away in the last round may now be missing, also from a list: that is no second fault.
        known = {fault.path for fault in faults}
        found = list(map(explain, details))
        faults += [fault for fault in found if not any(f"{path}.".startswith(f"{fault.path}.") for path in known)]
        # Deepest and last first, so that removing a list element moves no index still to come.
        for location in sorted({_removal(detail) for detail in details}, reverse=True):
            _remove(tree, location)


def _removal(detail: Any) -> Location:
    """What to take away so that a default steps in: the value, or what lacks a required one."""
    return detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]


def _remove(tree: Any, location: Location) -> None:
    *parents, last = location
    try:
        for step in parents:
            tree = tree[step]
        del tree[last]
    except (KeyError, IndexError, TypeError):
        return  # already gone with its parent
