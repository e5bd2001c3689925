"""Rows of a table on one set of ranks: what a rank does once, the imports and caches of its first step, costs the most.

The first test that asks for its row starts ranks for the rows of its world size and keeps what each row returned; every
test still looks at its own row only. Where such a start fails, the rows of it run alone, and only the faulty one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchtrain.testing.ranks import run_ranks

# What a row saves comes with the first few; more would hold up the first test, and cost more when one of them fails.
ROWS_PER_START = 4
# Below the limit of a test, so that rows that hang together still get to run alone.
TIMEOUT_S = 180.0


class SharedRanks:
    """Calls ``fn(*args)`` on the ranks of each row; a row's process has run other rows before it."""

    def __init__(self, fn: Callable[..., Any], rows: Mapping[str, tuple[int, tuple[object, ...]]]) -> None:
        self.fn = fn
        self.rows = rows
        self._started: set[str] = set()
        self._results: dict[str, list[Any]] = {}

    def results(self, name: str, chosen: Sequence[str]) -> list[Any]:
        """What the function returned for a row, by rank.

        Args:
            name: The row.
            chosen: Rows that this session asks for too (fixture ``chosen_rows``); others are not run.

        Raises:
            AssertionError: As of ``run_ranks``, for this row alone.
        """
        if name not in self._results:
            self._start(name, chosen)
        return self._results[name]

    def take(self, name: str, chosen: Sequence[str]) -> list[Any]:
        """The same for rows that are asked for once: what they returned is not kept."""
        self.results(name, chosen)
        return self._results.pop(name)

    def _start(self, name: str, chosen: Sequence[str]) -> None:
        world_size, args = self.rows[name]
        others = [row for row in chosen if row not in self._started and self._size(row) == world_size]
        together = list(dict.fromkeys([name, *others]))[:ROWS_PER_START] if name not in self._started else [name]
        self._started.update(together)
        if len(together) > 1:
            try:
                calls = [self.rows[row][1] for row in together]
                by_rank = run_ranks(_call_each, world_size, self.fn, calls, timeout_s=TIMEOUT_S)
            except AssertionError:
                pass  # Whose fault it is, each row finds out alone.
            else:
                self._results |= {row: [results[i] for results in by_rank] for i, row in enumerate(together)}
                return
        self._results[name] = run_ranks(self.fn, world_size, *args)

    def _size(self, row: str) -> int | None:
        return self.rows[row][0] if row in self.rows else None


def _call_each(fn: Callable[..., Any], rows: Sequence[tuple[object, ...]]) -> list[Any]:
    return [fn(*args) for args in rows]
