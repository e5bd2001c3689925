"""TensorBoard events under ``<output_dir>/tensorboard``: the numbers of ``metrics.jsonl`` as curves."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter

from torchtrain.metrics.report import EvalReport, StepReport


class TensorBoardSink:
    """Writes scalars and texts."""

    def __init__(self, output_dir: Path, *, resume_step: int | None) -> None:
        # Events of later steps, left by the run that was cut short, are hidden; a new run hides all.
        purge_step = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(output_dir / "tensorboard"), purge_step=purge_step)

    def write_step(self, report: StepReport) -> None:
        """Write numbers under ``train/``, each source's loss under ``loss_by_source/``, loads under ``experts/``."""
        scalars = asdict(report)
        step, by_source = scalars.pop("step"), scalars.pop("loss_by_source")
        del scalars["expert_loads"]
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, step)
        for source, loss in by_source.items():
            self._writer.add_scalar(f"loss_by_source/{source}", loss, step)
        for router, load in report.expert_loads.items():
            self._writer.add_scalar(f"experts/{router}/entropy", load.entropy, step)
            self._writer.add_scalar(f"experts/{router}/max_over_mean", load.max_over_mean, step)
            self._writer.add_histogram(f"experts/{router}/shares", torch.tensor(load.shares), step)

    def write_eval(self, report: EvalReport) -> None:
        """Write under ``eval/``."""
        self._writer.add_scalar("eval/loss", report.loss, report.step)
        self._writer.add_scalar("eval/time_s", report.time_s, report.step)

    def write_text(self, tag: str, text: str) -> None:
        """Write a text, verbatim: indented, so that its Markdown is not interpreted."""
        self._writer.add_text(tag, "".join(f"    {line}\n" for line in text.splitlines()))

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
