"""One op, several backends: each says what it can compute, and a preference says which of those to take.

Not for deciding what is fast: that is measured, and stands beside the op it was measured for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Problem = TypeVar("Problem")
"""What a choice depends on: sizes, dtype, device. Never values."""
Implementation = TypeVar("Implementation")


@dataclass(frozen=True)
class Backend(Generic[Problem, Implementation]):
    """One way to compute an op."""

    name: str
    implementation: Implementation
    is_able: Callable[[Problem], bool]
    """Whether it computes this problem, and rightly."""
    plugin: str = "torch"
    """Who brings it: ``torch``, or the name in ``kernel_config.name``."""
    conditions: str = "any device and dtype"
    """What ``is_able`` asks for, in words."""


class Op(Generic[Problem, Implementation]):
    """An op, its backends, and which to prefer.

    Args:
        name: For messages.
        prefer: Problem to the names of backends, the fastest first.
    """

    def __init__(self, name: str, prefer: Callable[[Problem], Sequence[str]]) -> None:
        self.name = name
        self._prefer = prefer
        self._backends: dict[str, Backend[Problem, Implementation]] = {}

    def register(self, backend: Backend[Problem, Implementation]) -> None:
        """Add a backend.

        Raises:
            ValueError: There is one of that name.
        """
        if backend.name in self._backends:
            raise ValueError(f"{self.name} has a backend {backend.name} already")
        self._backends[backend.name] = backend

    def choose(self, problem: Problem) -> Backend[Problem, Implementation]:
        """Take the first backend, in order of preference, that is able.

        Raises:
            ValueError: None is.
        """
        for name in self._prefer(problem):
            backend = self._backends.get(name)
            if backend is not None and backend.is_able(problem):
                return backend
        raise ValueError(f"no backend of {self.name} computes {problem}")

    def backend(self, name: str) -> Backend[Problem, Implementation]:
        """Return the backend of a name."""
        return self._backends[name]

    def names(self) -> list[str]:
        """List the backends, as registered."""
        return list(self._backends)

    def describe(self) -> str:
        """List the backends with their conditions, for messages."""
        return "; ".join(f"{backend.name} ({backend.conditions})" for backend in self._backends.values())
