"""The base of every job section: frozen, strict, and closed to unknown keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict


@dataclass(frozen=True, kw_only=True)
class Section:
    """A frozen group of job keys. Field docstrings stand under the fields and become the reference page."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
