"""The console: plain log lines, and a live bar below them on a terminal.

The lines are log records, so they stand in the rank's log file too. The bar is for eyes only.
"""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from torchtrain.metrics.report import EvalReport, StepReport
from torchtrain.runtime.logging import get_logger

_logger = get_logger(__name__)


def format_step(report: StepReport, total_steps: int) -> str:
    """Lay out one step as one line."""
    width = len(str(total_steps))
    parts = [
        f"step {report.step:>{width}}/{total_steps}",
        f"loss {report.loss:.4f}",
        f"grad norm {report.grad_norm:.4f}",
        f"lr {report.lr:.2e}",
        f"{report.tokens_per_second:,.0f} tokens/s",
        f"{report.step_time_s * 1e3:,.0f} ms",
        f"data wait {report.data_wait_s * 1e3:,.0f} ms",
        f"{report.peak_memory_bytes / 2**30:.2f} GiB",
    ]
    if report.mfu is not None:
        parts.insert(5, f"mfu {report.mfu:.1%}")
    return "  ".join(parts)


def format_eval(report: EvalReport) -> str:
    """Lay out one evaluation as one line."""
    return f"eval after step {report.step}  loss {report.loss:.4f}  {report.tokens:,} tokens  {report.time_s:.1f} s"


class ConsoleLines:
    """Logs a line every ``log_interval`` steps, and for the first and the last."""

    def __init__(self, *, total_steps: int, log_interval: int) -> None:
        self._total_steps = total_steps
        self._log_interval = max(1, log_interval)
        self._has_logged = False

    def write_step(self, report: StepReport) -> None:
        """Log the step, where it is one of those to log."""
        is_due = report.step % self._log_interval == 0 or report.step == self._total_steps
        if is_due or not self._has_logged:
            _logger.info(format_step(report, self._total_steps))
            self._has_logged = True

    def write_eval(self, report: EvalReport) -> None:
        """Log the evaluation."""
        _logger.info(format_eval(report))

    def write_text(self, tag: str, text: str) -> None:
        """Drop it: the caller prints what should be printed."""

    def close(self) -> None:
        """Do nothing."""


class LiveBar:
    """Keeps a progress bar with the latest numbers; log lines appear above it."""

    def __init__(self, *, total_steps: int, resume_step: int | None) -> None:
        self._progress = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=resume_step or 0, numbers="")
        self._progress.start()

    def write_step(self, report: StepReport) -> None:
        """Move the bar."""
        numbers = f"loss [bold]{report.loss:.4f}[/]  norm {report.grad_norm:.2f}  {report.tokens_per_second:,.0f} tok/s"
        self._progress.update(self._task, completed=report.step, numbers=numbers)

    def write_eval(self, report: EvalReport) -> None:
        """Leave it to the lines."""

    def write_text(self, tag: str, text: str) -> None:
        """Drop it: the caller prints what should be printed."""

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back."""
        self._progress.stop()
