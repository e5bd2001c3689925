"""Packages that only some commands need: what to install, in a line, where one is missing."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def imports_of_extra(extra: str, *, alternative: str | None = None) -> Generator[None]:
    """Import what an extra of this package brings; where that is missing, say so and end the process with 2.

    Args:
        extra: As in ``pyproject.toml``.
        alternative: Another command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        command = f".venv/bin/pip install -e '.[{extra}]'"
        commands = command if alternative is None else f"{command}, or {alternative}"
        print(f"error: {error.name} is not installed; run: {commands}", file=sys.stderr)
        raise SystemExit(2) from None
