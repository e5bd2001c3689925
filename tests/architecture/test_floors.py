"""The floors are held: import-linter passes here, and would not if somebody cut a corner."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

# For each contract of pyproject.toml, an import that breaks it: the file, and the lines planted at its end. One more
# for the order of techniques, which is above the techniques and below everything that knows a run.
PLANTED = {
    "Imports run down only": ("torchtrain/nn/rope.py", "def sly() -> None:\n    from torchtrain.data import batch\n"),
    "Only the composition root knows the model zoo": (
        "torchtrain/trainer/trainer.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from models.registry import load_spec\n",
    ),
    "A model knows no run": ("models/llama/spec.py", "import torchtrain.checkpoint\n"),
    "Families and the oracle are strangers": ("models/llama/model.py", "import models.reference.dense\n"),
    "The oracle shares no code with the accused": ("models/reference/dense.py", "import torchtrain.errors\n"),
    "A job is checked without torch": ("torchtrain/config/section.py", "def sly() -> None:\n    import torch\n"),
}

PLANTED_IN_ORDER = {
    "torchtrain.parallelize is not allowed to import torchtrain.model_spec": "import torchtrain.model_spec\n",
    "torchtrain.parallelize is not allowed to import torchtrain.trainer": "import torchtrain.trainer.run\n",
}


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_contract_is_kept() -> None:
    verdict = lint_imports(ROOT)
    assert verdict.returncode == 0, verdict.stdout


def test_every_contract_notices_a_planted_import(tmp_path: Path) -> None:
    for package in ("torchtrain", "models"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, lines in PLANTED.values():
        with (tmp_path / path).open("a") as file:
            file.write(f"\n{lines}")
    with (tmp_path / "torchtrain" / "parallelize.py").open("a") as file:
        file.write("\n" + "".join(PLANTED_IN_ORDER.values()))
    verdict = lint_imports(tmp_path)
    assert verdict.returncode != 0
    for complaint in PLANTED_IN_ORDER:
        assert complaint in verdict.stdout
    for contract in PLANTED:
        assert f"{contract} BROKEN" in verdict.stdout


def test_every_contract_has_a_plant() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {contract["name"] for contract in contracts} == set(PLANTED)


def test_every_family_is_a_stranger_to_the_others() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (strangers,) = (contract["modules"] for contract in contracts if contract["type"] == "independence")
    folders = {f"models.{init.parent.name}" for init in (ROOT / "models").glob("*/__init__.py")}
    assert set(strangers) == folders


def test_a_job_is_read_and_checked_without_importing_torch() -> None:
    program = "import sys, torchtrain.train, models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60).returncode == 0
