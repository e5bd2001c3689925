"""Profiler traces and memory snapshots on a schedule.

Every ``trace_interval``-th step is recorded, with the ``trace_steps - 1`` before it, into
``<output_dir>/profile/step_<N>/rank_<R>.json`` (open it in Perfetto or ``chrome://tracing``). A window opens
when the step before it is done, so one that would begin with the first step of the process is left out. Memory
snapshots stand beside the traces as ``rank_<R>_memory.pickle``, for https://pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from torchtrain.config.observation import ProfilingConfig
from torchtrain.runtime.device import dump_memory_snapshot, has_memory_snapshot, record_memory_history, synchronize
from torchtrain.runtime.logging import get_logger

_logger = get_logger(__name__)


class Profiler:
    """Wraps the training loop; ``step`` is called after each step. Costs two comparisons a step while off."""

    def __init__(self, config: ProfilingConfig, output_dir: Path, device: torch.device, rank: int) -> None:
        self._folder = output_dir / "profile"
        self._device = device
        self._rank = rank
        self._trace_interval = config.trace_interval
        self._trace_steps = max(1, min(config.trace_steps, config.trace_interval))
        self._trace: torch.profiler.profile | None = None
        self._snapshot_interval = config.memory_snapshot_interval if has_memory_snapshot(device) else 0
        if config.memory_snapshot_interval and not self._snapshot_interval:
            _logger.info(
                "profiling.memory_snapshot_interval: %s keeps no allocation history, so no snapshot is taken", device
            )

    def __enter__(self) -> Self:
        if self._snapshot_interval:
            record_memory_history(self._device, enabled=True)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
        if self._snapshot_interval:
            record_memory_history(self._device, enabled=False)

    def step(self, step: int) -> None:
        """Tell that ``step`` is done: write what ends with it, begin what starts after it."""
        if self._trace_interval:
            self._step_trace(step)
        if self._snapshot_interval and step % self._snapshot_interval == 0:
            dump_memory_snapshot(self._device, self._path(step, "_memory.pickle"))

    def _step_trace(self, step: int) -> None:
        if self._trace is not None and step % self._trace_interval == 0:
            synchronize(self._device)
            self._trace.stop()
            self._trace.export_chrome_trace(str(self._path(step, ".json")))
            self._trace = None
        if (step + self._trace_steps) % self._trace_interval == 0:
            self._trace = torch.profiler.profile(record_shapes=True)
            self._trace.start()

    def _path(self, step: int, suffix: str) -> Path:
        folder = self._folder / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank_{self._rank}{suffix}"
