"""run_train.sh and the rank launcher: what is started, where, and what comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAUNCHER = ROOT / "scripts" / "launch" / "launch_ranks.py"

# Stands for the trainer: standard library only, so that the tests cost one torch import (the launcher's).
WORKER = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
os.write(1, b"ready\\n")  # one write: print sends a line and its end apart, and another rank's may come between
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1 + rank]))
while not stopped:
    time.sleep(0.02)
time.sleep(0.5 * rank)
os.write(1, b"saved\\n")
sys.exit(143)
"""


def launcher_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PET_")} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return script


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([2, 2], 2),
        ([1, 3], 3),
        ([-9, 143], 137),
        ([143, -15], 143),
        ([143, 1], 1),
        ([-6, 3], 3),
    ],
)
def test_one_exit_code_stands_for_all_ranks(codes: list[int], expected: int) -> None:
    spec = spec_from_file_location("launch_ranks", LAUNCHER)
    launch_ranks = module_from_spec(spec)
    spec.loader.exec_module(launch_ranks)
    assert launch_ranks.summarise_exit_codes(codes) == expected


@pytest.mark.parametrize(("codes", "expected"), [(["0", "0"], 0), (["0", "3"], 3)])
def test_the_launcher_returns_its_workers_exit_code(worker: Path, codes: list[str], expected: int) -> None:
    command = [sys.executable, LAUNCHER, "--nproc-per-node=2", worker, *codes]
    finished = subprocess.run(command, capture_output=True, text=True, env=launcher_environment(), timeout=120)
    assert finished.returncode == expected, finished.stderr
    assert finished.stdout.count("ready") == 2
    assert finished.stderr == ""


def test_sigterm_reaches_every_worker_and_waits_for_its_checkpoint(worker: Path) -> None:
    command = [sys.executable, LAUNCHER, "--nproc-per-node=2", worker]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=launcher_environment()) as launched:
        ready = [launched.stdout.readline() for _ in range(2)]
        launched.send_signal(signal.SIGTERM)
        said, _ = launched.communicate(timeout=60)
    assert ready == ["ready\n"] * 2
    assert said == "saved\nsaved\n"
    assert launched.returncode == 143


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment counts as installed and whose Python prints how it was called."""
    checkout = tmp_path / "checkout"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / "scripts").mkdir()
    for name in ("run_train.sh", "pyproject.toml", "scripts/setup.sh"):
        shutil.copy(ROOT / name, checkout / name)
    checksum = subprocess.run("cksum <pyproject.toml", shell=True, cwd=checkout, capture_output=True, text=True).stdout
    (checkout / ".venv" / ".installed-core").write_text(f"{checksum.strip()} {checkout}\n")
    python = checkout / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "${OMP_NUM_THREADS:-unset}" "$@"\n')
    python.chmod(0o755)
    return checkout


def start(checkout: Path, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = launcher_environment() | {"CUDA_VISIBLE_DEVICES": ""} | variables
    del environment["OMP_NUM_THREADS"]
    command = [checkout / "run_train.sh", *words]
    return subprocess.run(command, cwd=cwd or checkout, env=environment, capture_output=True, text=True, timeout=30)


def test_without_words_the_debug_job_is_trained_on_one_rank_without_torchrun(checkout: Path) -> None:
    assert start(checkout).stdout == "unset -m torchtrain.train train_configs/llama/debug.yaml\n"


def test_a_job_is_found_from_where_the_caller_stands(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    said = start(checkout, "mine.yaml", "--training.steps", "5", cwd=tmp_path).stdout
    assert said == f"unset -m torchtrain.train {tmp_path}/mine.yaml --training.steps 5\n"


def test_overrides_alone_change_the_debug_job(checkout: Path) -> None:
    said = start(checkout, "--training.steps=5").stdout
    assert said.endswith("torchtrain.train train_configs/llama/debug.yaml --training.steps=5\n")


def test_ranks_share_the_cores(checkout: Path) -> None:
    said = start(checkout, NGPU="1000").stdout
    assert said.startswith("1 scripts/launch/launch_ranks.py --nproc-per-node=1000 -m torchtrain.train ")


def test_one_rank_per_visible_accelerator(checkout: Path) -> None:
    assert "--nproc-per-node=3 " in start(checkout, CUDA_VISIBLE_DEVICES="0,2,5").stdout


def test_one_rank_of_several_nodes_goes_through_torchrun(checkout: Path) -> None:
    assert "launch_ranks.py --nproc-per-node=1 " in start(checkout, PET_NNODES="2", NGPU="1").stdout


@pytest.mark.parametrize("count", ["0", "two", "-1", "1.5"])
def test_a_rank_count_that_is_none_is_refused(checkout: Path, count: str) -> None:
    refused = start(checkout, NGPU=count)
    assert refused.returncode == 2
    assert f"NGPU = '{count}'" in refused.stderr
