"""Which source sequence ``i`` of a run comes from, and which of its sequences: a pure function of ``i``.

The sources alternate in a pattern that repeats: as long as the shares need to come out exactly (weights 0.7 and 0.3:
ten sequences, seven and three), with each source's places spread evenly over it. So any stretch of the run has the
shares of the job to within about one sequence per source, and no state is needed to continue at any place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

_MAX_PERIOD = 10_000
"""Longest pattern. Weights that would need a longer one are rounded to this many parts."""


@dataclass(frozen=True)
class Slot:
    """A place in a source: the ``index``-th sequence that is drawn from it, counted from 0."""

    source: int
    index: int


@dataclass(frozen=True)
class Interleaving:
    """A pattern of sources that repeats."""

    counts: tuple[int, ...]
    """Places of each source in one period."""
    sources: NDArray[np.int64]
    """Source at each place of the period."""
    ranks: NDArray[np.int64]
    """How many places before it in the period belong to the same source."""

    def locate(self, index: int) -> Slot:
        """Find where sequence ``index`` comes from."""
        period, place = divmod(index, len(self.sources))
        source = int(self.sources[place])
        return Slot(source, period * self.counts[source] + int(self.ranks[place]))


def interleave(counts: Sequence[int]) -> Interleaving:
    """Spread so many places of each source evenly over one period."""
    sources = np.repeat(np.arange(len(counts)), counts)
    ranks = np.concatenate([np.arange(count) for count in counts])
    # The k-th of n places wants to stand in the middle of the k-th n-th of the period.
    wanted = (ranks + 0.5) / np.repeat(np.maximum(counts, 1), counts)
    order = np.argsort(wanted, kind="stable")
    return Interleaving(tuple(counts), sources[order], ranks[order])


def build_mixture(weights: Sequence[float]) -> Interleaving:
    """Find the shortest pattern that gives each source its share.

    Args:
        weights: Positive; as written in the job, so that 0.1 is one tenth.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return interleave([int(share * period) for share in shares])
    return interleave([max(1, round(share * _MAX_PERIOD)) for share in shares])
