"""``metrics.jsonl`` and ``eval.jsonl``: one JSON object per line, for tools to read.

``metrics.jsonl`` holds one object per step and nothing else; evaluations go to ``eval.jsonl`` beside it. The JSON is
strict: a value that is not finite is written as ``null``. Every line is flushed, so a reader may follow along and a
kill loses at most the line being written.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from torchtrain.metrics.report import EvalReport, StepReport


class JsonlSink:
    """Writes steps to ``metrics.jsonl`` and evaluations to ``eval.jsonl``."""

    def __init__(self, output_dir: Path, *, resume_step: int | None) -> None:
        """Open both files.

        Args:
            output_dir: Folder of the run.
            resume_step: Step the run continues after: later lines, left by the run that was cut short, are removed.
                ``None`` begins anew.
        """
        self._steps = open_after(output_dir / "metrics.jsonl", resume_step)
        self._evals = open_after(output_dir / "eval.jsonl", resume_step)

    def write_step(self, report: StepReport) -> None:
        """Append one line; ``mfu``, ``loss_by_source`` and ``expert_loads`` only where they say something."""
        record = asdict(report)
        if report.mfu is None:
            del record["mfu"]
        if len(report.loss_by_source) < 2:
            del record["loss_by_source"]
        del record["expert_loads"]
        if report.expert_loads:
            # Without the shares of every expert: those of a large model are more than all the rest.
            record["expert_loads"] = {
                router: {"entropy": load.entropy, "max_over_mean": load.max_over_mean}
                for router, load in report.expert_loads.items()
            }
        _append(self._steps, record)

    def write_eval(self, report: EvalReport) -> None:
        """Append one line."""
        _append(self._evals, asdict(report))

    def write_text(self, tag: str, text: str) -> None:
        """Drop it: texts have files of their own."""

    def close(self) -> None:
        """Close both files."""
        self._steps.close()
        self._evals.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a file; a line torn by a kill is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def open_after(path: Path, resume_step: int | None) -> TextIO:
    """Open for appending, cut back to ``resume_step``; the old file stands until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [] if resume_step is None or not path.exists() else read_jsonl(path)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        for record in kept:
            if record.get("step", math.inf) <= resume_step:
                _append(file, record)
    os.replace(draft, path)
    return path.open("a", encoding="utf-8")


def _append(file: TextIO, record: dict[str, Any]) -> None:
    file.write(json.dumps(_finite(record), allow_nan=False) + "\n")
    file.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
