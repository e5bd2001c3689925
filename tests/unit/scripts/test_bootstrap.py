"""What a failed installation leaves for the next start."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

BOOTSTRAP = Path(__file__).parents[3] / "scripts" / "bootstrap.py"


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = spec_from_file_location("bootstrap", BOOTSTRAP)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "ENVIRONMENT", tmp_path)
    monkeypatch.setattr(module, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(module, "UNFINISHED", tmp_path / ".installing")
    monkeypatch.setattr(module, "is_usable_environment", lambda: True)
    return module


@pytest.mark.parametrize(
    ("script", "code", "is_unfinished"), [("exit 0", 0, False), ("exit 7", 1, False), ("kill -9 $$", 1, True)]
)
def test_only_a_killed_pip_leaves_the_mark_that_costs_the_environment(
    bootstrap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, code: int, is_unfinished: bool
) -> None:
    (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr("sys.argv", ["bootstrap.py", "--stamp", "s"])
    assert bootstrap.main() == code
    assert (tmp_path / ".installing").exists() == is_unfinished
