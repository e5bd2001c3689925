"""Weights & Biases, where it is installed and the job asks for it."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtrain.config.observation import MetricsConfig
from torchtrain.errors import ConfigError, Fault
from torchtrain.metrics.report import EvalReport, StepReport


def require_wandb() -> None:
    """Check on every rank, so that none waits for a rank that failed.

    Raises:
        ConfigError: The package is not installed.
    """
    if importlib.util.find_spec("wandb") is None:
        rule = "needs the package wandb, which is not installed"
        raise ConfigError([Fault("metrics.wandb", True, rule, "run: pip install wandb, or set metrics.wandb to false")])


class WandbSink:
    """Logs to one wandb run named after the output folder."""

    def __init__(self, config: MetricsConfig, output_dir: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=config.wandb_project, name=output_dir.name, dir=str(output_dir))

    def write_step(self, report: StepReport) -> None:
        """Log each number under ``train/``."""
        scalars = {f"train/{name}": value for name, value in asdict(report).items() if isinstance(value, int | float)}
        by_source = {f"loss_by_source/{source}": loss for source, loss in report.loss_by_source.items()}
        self._run.log(scalars | by_source, step=report.step)

    def write_eval(self, report: EvalReport) -> None:
        """Log under ``eval/``."""
        self._run.log({"eval/loss": report.loss, "eval/time_s": report.time_s}, step=report.step)

    def write_text(self, tag: str, text: str) -> None:
        """Keep the text with the run's configuration."""
        self._run.config.update({tag: text}, allow_val_change=True)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
