"""Jobs that nobody chose: what the rules let through equals one rank, what they refuse ends with exit code 2."""

from __future__ import annotations

import re

import pytest

from tests.parity.harness import one_rank, run_topology
from tests.parity.random_jobs import BASE, drawn_job
from tests.parity.test_topologies import check
from torchtrain.train import main

NUM_ILLEGAL = 40


def test_drawn_job_equals_one_rank(random_job_seed: int) -> None:
    job = drawn_job(random_job_seed, legal=True)
    print(job)  # pytest shows it where the comparison fails
    reference = one_rank(*job.numbers, "training.micro_batch_size=1")
    check(run_topology(job.world_size, *job.overrides), reference)


@pytest.mark.parametrize("index", range(NUM_ILLEGAL))
def test_drawn_job_that_is_refused_says_why_and_ends_with_exit_code_2(
    index: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = drawn_job(index, legal=False)
    launched = {"RANK": 0, "WORLD_SIZE": job.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in launched.items():
        monkeypatch.setenv(name, str(value))
    assert main([*BASE, *(f"--{override}" for override in job.overrides)]) == 2
    said = capsys.readouterr().err
    assert re.match(r"(\[rank 0\] )?error: ", said)
    # Each fault names its key and a way out.
    assert re.search(r"(accelerator|training|fsdp_config|model)\.\w+", said)
    assert re.search(r"use |set |start |switch |remove ", said)
    assert "Traceback" not in said
