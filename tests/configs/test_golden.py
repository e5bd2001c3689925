"""Every job of ``train_configs/`` resolves to its golden file, so that a changed default shows up in a diff.

Regenerate with ``python tests/configs/test_golden.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from models.registry import resolve_architecture
from torchtrain.config.availability import find_unavailable
from torchtrain.config.dump import dump_job
from torchtrain.config.load import load_job
from torchtrain.config.rules import find_job_warnings
from torchtrain.distributed.topology import Topology

ROOT = Path(__file__).parents[2]
JOBS = sorted(path for path in (ROOT / "train_configs").rglob("*") if path.is_file())
GOLDEN = Path(__file__).parent / "golden"
WORLD_SIZES = {"debug_4ranks.yaml": 4, "1b_fsdp.yaml": 8, "8b_hsdp.yaml": 32, "70b_fsdp.yaml": 256}


def golden_path(job_path: Path) -> Path:
    return GOLDEN / job_path.relative_to(ROOT / "train_configs").with_suffix(".yaml")


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_job_resolves_to_its_golden_file(path):
    assert dump_job(load_job(path)) == golden_path(path).read_text(), "if meant: python tests/configs/test_golden.py"


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_job_can_run_as_it_is(path):
    job = load_job(path)
    assert find_unavailable(job) == []
    assert find_job_warnings(job) == []
    Topology.resolve(job, WORLD_SIZES.get(path.name, 1))
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    assert job.training.seq_len <= architecture.max_position_embeddings


def test_no_golden_file_is_left_over():
    assert set(GOLDEN.rglob("*.yaml")) == {golden_path(path) for path in JOBS}


if __name__ == "__main__":
    for job_path in JOBS:
        golden_path(job_path).parent.mkdir(parents=True, exist_ok=True)
        golden_path(job_path).write_text(dump_job(load_job(job_path)))
