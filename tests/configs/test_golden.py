"""Every job of ``train_configs/`` resolves to its golden file, so that a changed default shows up in a diff.

Regenerate with ``python tests/configs/test_golden.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchtrain.config.availability import find_unavailable
from torchtrain.config.dump import dump_job
from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.load import load_job
from torchtrain.train import check_job

ROOT = Path(__file__).parents[2]
JOBS = sorted(path for path in (ROOT / "train_configs").rglob("*") if path.is_file())
GOLDEN = Path(__file__).parent / "golden"
# The ranks that each file's comment names.
WORLD_SIZES = {
    "debug.yaml": (1, 2, 4, 8, 16),
    "debug_bf16.yaml": (1, 2, 4, 8, 16),
    "debug_bytes.toml": (1, 2, 4, 8),
    "debug_muon.yaml": (1, 2, 4, 8, 16),
    "debug_4ranks.yaml": (4,),
    "debug_cp2.yaml": (2,),
    "debug_ep4.yaml": (4,),
    "debug_pp2.yaml": (2, 4, 8, 16),
    "debug_tp2.yaml": (4, 8),
    "smollm2_135m_finetune.yaml": (1, 2, 4),
    "1b_fsdp.yaml": (8,),
    "8b_hsdp.yaml": (32,),
    "70b_fsdp.yaml": (256,),
    "30b_a3b.yaml": (32,),
}
LAUNCH_FILES = ("slurm.sbatch", "pytorchjob.yaml", "indexed_job.yaml")


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
    for world_size in WORLD_SIZES[path.name]:
        check_job([str(path)], world_size)


@pytest.mark.parametrize("name", LAUNCH_FILES)
def test_launch_file_starts_a_job_that_its_ranks_can_run(name):
    text = (ROOT / "scripts" / "launch" / name).read_text()
    (job_name,) = set(re.findall(r"train_configs/\S+\.yaml", text))
    overrides = re.findall(r"^ +- (--\S+)$", text, flags=re.MULTILINE)
    check_job([str(ROOT / job_name), *overrides], world_size=2 * 8)
    ranks_of_a_node = r"gpus-per-node=8$|nvidia.com/gpu: 8"
    nodes = r"--nodes=2$|completions: 2$|(?s:replicas: 1\n.*replicas: 1\n)"
    assert re.search(ranks_of_a_node, text, flags=re.MULTILINE)
    assert re.search(nodes, text, flags=re.MULTILINE)


def test_no_golden_file_is_left_over():
    assert set(GOLDEN.rglob("*.yaml")) == {golden_path(path) for path in JOBS}


if __name__ == "__main__":
    for job_path in JOBS:
        golden_path(job_path).parent.mkdir(parents=True, exist_ok=True)
        golden_path(job_path).write_text(dump_job(load_job(job_path)))
