"""Jobs that nobody chose: what the rules let through equals one rank, what they refuse ends with exit code 2."""

from __future__ import annotations

import math
import re
from functools import cache

import pytest

from tests.parity.harness import SharedTopologies
from tests.parity.random_jobs import BASE, LOW_PRECISION, drawn_job
from tests.parity.test_topologies import check
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_SCALAR
from torchtrain.train import check_job, main

NUM_ILLEGAL = 40


@cache
def runs_of(seeds: tuple[str, ...]) -> tuple[SharedTopologies, SharedTopologies]:
    """The drawn jobs, and what one rank makes of each."""
    jobs = {seed: drawn_job(int(seed), legal=True) for seed in seeds}
    drawn = {seed: (job.world_size, job.overrides) for seed, job in jobs.items()}
    alone = {seed: (1, (*job.numbers, "training.micro_batch_size=1")) for seed, job in jobs.items()}
    return SharedTopologies(drawn), SharedTopologies(alone)


def test_drawn_job_equals_one_rank(random_job_seed: int, chosen_rows: list[str]) -> None:
    job = drawn_job(random_job_seed, legal=True)
    print(job)  # pytest shows it where the comparison fails
    drawn, alone = runs_of(tuple(chosen_rows))
    reference = alone.run(str(random_job_seed), chosen_rows)
    outcome = drawn.run(str(random_job_seed), chosen_rows)
    if not job.is_low_precision:
        check(outcome, reference)
        return
    for ours, theirs in zip(outcome.losses, reference.losses, strict=True):
        assert relative_error(ours, theirs) <= BF16_SCALAR
    assert all(math.isfinite(norm) for norm in outcome.norms)


def test_draws_cover_what_they_are_to_cover() -> None:
    words = {word for index in range(25) for word in drawn_job(index, legal=True).technique}
    assert LOW_PRECISION in words
    assert "accelerator.pp_micro_batch_size=1" in words
    assert any(re.match(r"accelerator\.pp_layers=\[", word) for word in words)


SIZES = (
    "--model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 36, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}",
    "--training.seq_len=16",
    "--training.global_batch_size=48",
    "--training.micro_batch_size=2",
)
# Chosen by hand: rules that refuse too much would leave nothing to compare, and no other test would notice.
LEGAL: dict[str, tuple[int, str]] = {
    "odd_data_parallel": (3, "{}"),
    "tensor": (4, "{tp_size: 2, loss_parallel: true}"),
    "tensor_with_sequence": (4, "{tp_size: 2, sequence_parallel: true}"),
    "ulysses_of_as_many_ranks_as_heads": (4, "{cp_size: 4, cp_mode: ulysses}"),
    "allgather_beside_tensor": (4, "{cp_size: 2, cp_mode: allgather, tp_size: 2}"),
    "ring_beside_sequence": (8, "{cp_size: 2, cp_mode: ring, tp_size: 2, sequence_parallel: true}"),
    "a_stage_a_layer": (4, "{pp_size: 4}"),
    "loops": (2, "{pp_size: 2, pp_schedule: Interleaved1F1B}"),
    "a_v_of_listed_stages": (4, "{pp_size: 2, pp_schedule: ZBVZeroBubble, pp_layers: [1, 1, 1, 1]}"),
    "smallest_micro_batches_between_stages": (2, "{pp_size: 2, pp_schedule: DualPipeV, pp_micro_batch_size: 1}"),
    "all_at_once": (8, "{pp_size: 2, tp_size: 2, cp_size: 2, sequence_parallel: true, loss_parallel: true}"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_jobs_that_must_be_legal_are(name: str) -> None:
    world_size, accelerator = LEGAL[name]
    check_job([*BASE, *SIZES, f"--accelerator={accelerator}"], world_size)


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
    heading, *faults = said.splitlines()
    assert f"({len(faults)} fault{'s' * (len(faults) > 1)})" in heading
    for number, fault in enumerate(faults, start=1):
        assert re.match(rf"  {number}\. (accelerator|training|fsdp_config|model)\.\w+ = .+: \w", fault), fault
        assert re.search(r"; (use|set|start|switch|remove) \S", fault), fault
    assert "Traceback" not in said
