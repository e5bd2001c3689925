"""The protocol of everything that takes reports: a file, a dashboard, a console."""

from __future__ import annotations

from typing import Protocol

from torchtrain.metrics.report import EvalReport, StepReport


class MetricsSink(Protocol):
    """Takes reports on the main rank, in step order."""

    def write_step(self, report: StepReport) -> None:
        """Take one step's report."""
        ...

    def write_eval(self, report: EvalReport) -> None:
        """Take one evaluation's report."""
        ...

    def write_text(self, tag: str, text: str) -> None:
        """Take a text: the resolved job, a sample."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...
