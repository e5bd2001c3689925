"""What a recomputed forward takes from the first one instead of computing it again.

Activation checkpointing runs a block twice. A discrete choice must not come out otherwise the second time, and an
exchange between ranks need not happen twice: ``keep`` remembers both. Not for what backward needs in any case; autograd
saves that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token

from torch import Tensor


class Memory:
    """What one forward of one checkpointed region kept, in order."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._num_replayed: int | None = None

    def take(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute and remember, or hand out what was remembered."""
        if self._num_replayed is None:
            self._kept.append(compute())
            return self._kept[-1]
        self._num_replayed += 1
        return self._kept[self._num_replayed - 1]

    def recording(self) -> AbstractContextManager[None]:
        """Remember what ``keep`` computes inside."""
        return _InUse(self, num_replayed=None)

    def replaying(self) -> AbstractContextManager[None]:
        """Hand out, from the first on, what was remembered; may be entered again and again."""
        return _InUse(self, num_replayed=0)

    def begin(self, num_replayed: int | None) -> None:
        """Go back to the first, to hand out, or to the end, to remember."""
        self._num_replayed = num_replayed


class _InUse(AbstractContextManager[None]):
    # A class, because a generator's context can be entered only once, and backward may pass twice.
    def __init__(self, memory: Memory, num_replayed: int | None) -> None:
        self._memory = memory
        self._num_replayed = num_replayed
        self._tokens: list[Token[Memory | None]] = []

    def __enter__(self) -> None:
        self._memory.begin(self._num_replayed)
        self._tokens.append(_memory.set(self._memory))

    def __exit__(self, *_: object) -> None:
        _memory.reset(self._tokens.pop())


_memory: ContextVar[Memory | None] = ContextVar("recomputation_memory", default=None)


def keep(compute: Callable[[], Tensor]) -> Tensor:
    """Return what ``compute`` returned in the forward of which this one is the recomputation, else call it.

    Args:
        compute: Must run no operator that selective checkpointing keeps, and build no autograd graph: its result is the
            same tensor both times.

    Collective: what ``compute`` is, in the first forward only.
    """
    memory = _memory.get()
    return compute() if memory is None else memory.take(compute)
