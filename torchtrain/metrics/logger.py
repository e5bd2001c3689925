"""Hands each report of the trainer to every sink that the job asks for. Knows nothing of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path

from torchtrain.config.observation import MetricsConfig
from torchtrain.metrics.console import ConsoleLines, LiveBar
from torchtrain.metrics.jsonl import JsonlSink
from torchtrain.metrics.report import EvalReport, StepReport
from torchtrain.metrics.sink import MetricsSink
from torchtrain.metrics.wandb import WandbSink, require_wandb


class MetricsLogger:
    """Fans reports out on the main rank; does nothing on the others."""

    def __init__(
        self,
        config: MetricsConfig,
        output_dir: Path,
        *,
        total_steps: int,
        resolved_job: str,
        is_main: bool,
        resume_step: int | None = None,
    ) -> None:
        """Open the sinks.

        Args:
            config: Section ``metrics``.
            output_dir: Folder of the run.
            total_steps: Steps of the whole run.
            resolved_job: The job with every default, kept beside the curves.
            is_main: This rank is the one that reports.
            resume_step: Step the run continues after; what an earlier attempt reported beyond it is dropped. ``None``
                begins anew.

        Raises:
            ConfigError: ``metrics.wandb`` is set and the package is not installed (on every rank).
        """
        if config.wandb:
            require_wandb()
        self._sinks: list[MetricsSink] = []
        if is_main:
            self._sinks = _open_sinks(config, output_dir, total_steps=total_steps, resume_step=resume_step)
        self.log_text("job", resolved_job)

    def log_step(self, report: StepReport) -> None:
        """Report one step."""
        for sink in self._sinks:
            sink.write_step(report)

    def log_eval(self, report: EvalReport) -> None:
        """Report one evaluation."""
        for sink in self._sinks:
            sink.write_eval(report)

    def log_text(self, tag: str, text: str) -> None:
        """Keep a text beside the curves."""
        for sink in self._sinks:
            sink.write_text(tag, text)

    def close(self) -> None:
        """Close every sink; further reports go nowhere."""
        while self._sinks:
            self._sinks.pop().close()


def _open_sinks(
    config: MetricsConfig, output_dir: Path, *, total_steps: int, resume_step: int | None
) -> list[MetricsSink]:
    sinks: list[MetricsSink] = [JsonlSink(output_dir, resume_step=resume_step)]
    if config.tensorboard:
        # Costs a second to import, so only those who want it pay.
        from torchtrain.metrics.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(output_dir, resume_step=resume_step))
    if config.wandb:
        sinks.append(WandbSink(config, output_dir))
    sinks.append(ConsoleLines(total_steps=total_steps, log_interval=config.log_interval))
    if config.console == "rich" or (config.console == "auto" and sys.stdout.isatty()):
        sinks.append(LiveBar(total_steps=total_steps, resume_step=resume_step))
    return sinks
