"""What keys a job has: a walk over the section dataclasses, for messages and for the reference page."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from torchtrain.config.job import Job
from torchtrain.config.section import Section


@dataclass(frozen=True)
class Key:
    """One key of the job file."""

    path: str
    """Dotted path; ``*`` stands for a list index."""
    attribute: str
    """Name in the dataclass, which an alias such as ``_target_`` differs from."""
    hint: Any
    """Type, aliases resolved."""
    default: Any
    """Default value, or ``dataclasses.MISSING``."""
    owner: type[Section]
    """Section class that declares the key."""

    @property
    def subsection(self) -> type[Section] | None:
        """The section that this key opens, also as an element of a list."""
        for candidate in (self.hint, *typing.get_args(self.hint)):
            if isinstance(candidate, type) and issubclass(candidate, Section):
                return candidate
        return None

    @property
    def is_nullable(self) -> bool:
        """Whether the key takes null."""
        is_union = isinstance(self.hint, types.UnionType) or typing.get_origin(self.hint) is typing.Union
        return is_union and type(None) in typing.get_args(self.hint)


def section_keys(section: type[Section], prefix: str = "") -> Iterator[Key]:
    """Yield the keys that one section declares itself, in order."""
    hints = typing.get_type_hints(section, include_extras=True)
    for field in dataclasses.fields(section):
        hint, name = hints[field.name], field.name
        if typing.get_origin(hint) is typing.Annotated:
            hint, *extras = typing.get_args(hint)
            name = next((extra.alias for extra in extras if isinstance(extra, FieldInfo) and extra.alias), name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        yield Key(path=f"{prefix}{name}", attribute=field.name, hint=hint, default=default, owner=section)


def walk_keys(section: type[Section] = Job, prefix: str = "") -> Iterator[Key]:
    """Yield every key below a section, each subsection before its own keys."""
    for key in section_keys(section, prefix):
        yield key
        if key.subsection is not None:
            step = "" if key.subsection is key.hint else "*."
            yield from walk_keys(key.subsection, f"{key.path}.{step}")


@functools.cache
def job_keys() -> dict[str, Key]:
    """Every key of the job by its path."""
    return {key.path: key for key in walk_keys()}


def pattern_of(path: str) -> str:
    """The schema path of a concrete one: ``dataset.sources.0.path`` is ``dataset.sources.*.path``."""
    return ".".join("*" if step.isdecimal() else step for step in path.split("."))


def value_at(job: Job, path: str) -> Any:
    """The value at a dotted path (no list indices).

    Args:
        job: The job.
        path: A path as the file spells it, aliases included.
    """
    value: Any = job
    steps = path.split(".")
    for depth in range(len(steps)):
        value = getattr(value, job_keys()[".".join(steps[: depth + 1])].attribute)
    return value
