"""The console and the log files.

Plain lines are the base: rank 0 speaks on stdout, the others only when something failed, and every rank keeps its own
file, so that the rank that failed first can be found. Progress bars are not made here (``metrics.console``).
"""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from torchtrain.errors import ConfigError, Fault

_FORMAT = "%(asctime)s %(levelname).1s %(message)s"
_FILE_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
_OUR_ROOTS = ("torchtrain", "models")
_HANDLER_PREFIX = "torchtrain."


class _ConsoleHandler(logging.Handler):
    """Prints to whatever stdout is at the moment: a live progress bar replaces it, to keep lines above the bar."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stdout, flush=True)


# For ``extra=`` of a record that the console should not show, such as a traceback that a line there sums up.
FILE_ONLY = {"is_for_file_only": True}


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass ``__name__``."""
    return logging.getLogger(name)


def setup_logging(rank: int, output_dir: Path | None) -> None:
    """Route all log records of this process; a second call replaces the first.

    Args:
        rank: Global rank. Rank 0 prints everything from INFO on, others print errors only.
        output_dir: Each rank appends to ``logs/rank_<rank>.log`` in here; ``None`` keeps no files.

    Raises:
        ConfigError: ``output_dir`` cannot be written to.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.name or "").startswith(_HANDLER_PREFIX)]:
        root.removeHandler(handler)
        handler.close()

    console = _ConsoleHandler(logging.INFO if rank == 0 else logging.ERROR)
    console.set_name(f"{_HANDLER_PREFIX}console")
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console.addFilter(lambda record: not getattr(record, "is_for_file_only", False))
    console.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root.addHandler(console)
    if output_dir is not None:
        root.addHandler(_file_handler(output_dir / "logs" / f"rank_{rank}.log"))

    # Libraries are heard from WARNING on (the root's own level), our own code from INFO on.
    for name in _OUR_ROOTS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)


def _file_handler(path: Path) -> logging.Handler:
    output_dir = path.parent.parent
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # The log may be there from an earlier run; what else a run leaves may not.
        with tempfile.TemporaryFile(dir=output_dir):
            pass
        handler = logging.FileHandler(path, mode="a", encoding="utf-8")
    except OSError as error:
        rule, fix = f"must be a folder that can be written to ({error})", "name another one, or make room for it"
        raise ConfigError([Fault("training.output_dir", str(output_dir), rule, fix)]) from error
    handler.set_name(f"{_HANDLER_PREFIX}file")
    handler.setFormatter(logging.Formatter(_FILE_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S"))
    return handler
