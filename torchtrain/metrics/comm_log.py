"""``comm_trace.jsonl``: one JSON object per record of the communication trace, all ranks in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtrain.metrics.jsonl import open_after


class CommLog:
    """Appends the records of each step; what a record says stands in ``distributed.comm_trace``."""

    def __init__(self, output_dir: Path, *, is_main: bool, resume_step: int | None) -> None:
        """Open the file, on the main rank.

        Args:
            output_dir: Folder of the run.
            is_main: Whether this is rank 0.
            resume_step: Step the run continues after: later records are removed. ``None`` begins anew.
        """
        self._output_dir = output_dir
        self._file = open_after(output_dir / "comm_trace.jsonl", resume_step) if is_main else None

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Append one step of all ranks."""
        assert self._file is not None, "only the main rank writes"
        self._file.write(_lines(records))
        self._file.flush()

    def write_failed_step(self, rank: int, records: Sequence[dict[str, Any]]) -> None:
        """Leave what this rank had recorded when its step failed in ``comm_trace_failed_rank_<R>.jsonl``."""
        path = self._output_dir / f"comm_trace_failed_rank_{rank}.jsonl"
        path.write_text(_lines(records), encoding="utf-8")

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def _lines(records: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
