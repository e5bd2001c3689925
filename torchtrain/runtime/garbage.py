"""Python's garbage collector on a schedule.

Left to itself, each rank collects whenever its own allocation counters say so, and every other rank waits for it in
the next collective. On a schedule, all ranks pause at the same step.
"""

from __future__ import annotations

import gc


class GarbageSchedule:
    """Switches automatic collection off and collects on every ``interval``-th step; 0 leaves Python alone."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        if interval > 0:
            gc.collect()
            gc.disable()

    def collect_on(self, step: int) -> None:
        """Collect if the schedule says so.

        Generation 1: what a step leaves behind is young; a full collection would walk every object of torch.
        """
        if self._interval > 0 and step % self._interval == 0:
            gc.collect(1)

    def close(self) -> None:
        """Give collection back to Python."""
        if self._interval > 0:
            gc.enable()
