"""What a job may already say but this version does not do yet. Not silently ignored: it stops the run.

A feature that arrives removes its row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtrain.config.job import Job
from torchtrain.config.schema import value_at
from torchtrain.errors import Fault


@dataclass(frozen=True)
class Unavailable:
    """A key of which only some values work so far."""

    path: str
    feature: str
    is_available: Callable[[Any], bool]
    use: str
    """The values that work."""


NOT_YET = (Unavailable("task.name", "supervised fine-tuning", lambda name: name == "pretrain", "pretrain"),)


def find_unavailable(job: Job) -> list[Fault]:
    """One fault for each key that asks for something this version does not do yet."""
    faults = []
    for row in NOT_YET:
        value = value_at(job, row.path)
        if not row.is_available(value):
            shown = list(value) if isinstance(value, tuple) else value
            faults.append(Fault(row.path, shown, f"not available yet ({row.feature})", f"use {row.use} for now"))
    return faults
