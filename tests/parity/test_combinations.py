"""Techniques together against one rank: pipelines with tensor and context parallelism, packed and plain, with FSDP."""

from __future__ import annotations

import math
from typing import get_args

import pytest

from tests.parity import harness
from tests.parity.harness import Outcome, SharedTopologies, one_rank, train_on_this_rank
from tests.parity.test_topologies import SHARD_2, check
from torchtrain.config.parallel import CpMode, PpSchedule
from torchtrain.testing.ranks import run_ranks

# Four query heads to a key/value head; vocabulary and feed-forward rows that no shard size divides; a layer a stage.
GROUPED = (
    "model.overrides={vocab_size: 101, hidden_size: 40, intermediate_size: 38, num_hidden_layers: 4, "
    "num_attention_heads: 8, num_key_value_heads: 2, head_dim: 6, tie_word_embeddings: false}"
)
TIED = GROUPED.replace("num_hidden_layers: 4", "num_hidden_layers: 2").replace("embeddings: false", "embeddings: true")
TP, CP, PP = "accelerator.tp_size=2", "accelerator.cp_size=2", "accelerator.pp_size=2"
SP, LP = "accelerator.sequence_parallel=true", "accelerator.loss_parallel=true"
ONE, TWO = "training.micro_batch_size=1", "training.micro_batch_size=2"
PLAIN = "dataset.document_aware=false"
FUSED, ONE_SYNC = "fsdp_config.comm_fusion=true", "fsdp_config.requires_grad_sync=false"


def mode(name: CpMode) -> str:
    return f"accelerator.cp_mode={name}"


def schedule(name: PpSchedule) -> str:
    return f"accelerator.pp_schedule={name}"


CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "fsdp2_tp2_plain": (4, GROUPED, (SHARD_2, TP, TWO, PLAIN)),
    "fsdp2_tp2_cp2_tied": (8, TIED, (SHARD_2, TP, SP, LP, CP, mode("ring"), TWO, ONE_SYNC)),
    "tp2_cp2_plain": (4, GROUPED, (SHARD_2, TP, SP, CP, mode("allgather"), ONE, PLAIN, FUSED)),
    "pp2_fsdp2_plain": (4, GROUPED, (PP, SHARD_2, ONE, PLAIN)),
    "pp2_tp2": (4, GROUPED, (PP, TP, TWO)),
    "pp2_tp2_sp_lp_plain": (4, GROUPED, (PP, TP, SP, LP, schedule("ZBVZeroBubble"), ONE, PLAIN)),
    "pp2_fsdp2_tp2_sp": (8, GROUPED, (PP, SHARD_2, TP, SP, schedule("Interleaved1F1B"), ONE, FUSED)),
    "pp2_cp2_ulysses": (4, GROUPED, (PP, CP, mode("ulysses"), SHARD_2, TWO)),
    "pp2_cp2_allgather_plain": (4, GROUPED, (PP, CP, mode("allgather"), schedule("InterleavedZeroBubble"), TWO, PLAIN)),
    "pp2_cp2_ring": (4, GROUPED, (PP, CP, mode("ring"), schedule("DualPipeV"), SHARD_2, ONE)),
    "pp2_tp2_cp2": (8, GROUPED, (PP, TP, SP, LP, CP, mode("ring"), schedule("GPipe"), SHARD_2, ONE)),
}


RUNS = SharedTopologies({name: (size, (model, *overrides)) for name, (size, model, overrides) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_combination_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    _, model, overrides = CASES[name]
    numbers = (model, *([PLAIN] if PLAIN in overrides else []))
    check(RUNS.run(name, chosen_rows), one_rank(*numbers, "training.micro_batch_size=8"))


LOW = ("fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}", TWO)
SOME_SCHEDULES: tuple[PpSchedule, ...] = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
LOW_JOBS: dict[str, tuple[int, list[tuple[str, ...]]]] = {
    "four_ranks": (
        4,
        [
            (SHARD_2, TP),
            (SHARD_2, TP, SP),
            (SHARD_2, TP, SP, LP),
            (SHARD_2, TP, CP),
            (PP, TP, SP, LP),
            *[(SHARD_2, CP, mode(name)) for name in get_args(CpMode)],
            *[(PP, SHARD_2, schedule(name), ONE) for name in SOME_SCHEDULES],
            (PP, SHARD_2, CP, mode("ring")),
        ],
    ),
    "other_schedules": (
        4,
        [(PP, SHARD_2, schedule(name), ONE) for name in get_args(PpSchedule) if name not in SOME_SCHEDULES],
    ),
    "eight_ranks": (8, [(PP, SHARD_2, TP, SP, LP), (PP, SHARD_2, TP, CP, mode("ring"))]),
}


def train_one_step_each(jobs: list[tuple[str, ...]]) -> list[Outcome]:
    """One job after the other on the same ranks: to start them takes longer than a step."""
    harness.NUM_STEPS = 1
    return [train_on_this_rank((GROUPED, *LOW, *overrides)) for overrides in jobs]


@pytest.mark.parametrize("name", LOW_JOBS)
def test_every_combination_trains_in_bf16(name: str) -> None:
    world_size, jobs = LOW_JOBS[name]
    by_rank = run_ranks(train_one_step_each, world_size, jobs)
    for index, overrides in enumerate(jobs):
        scalars = {(*outcomes[index].losses, *outcomes[index].norms) for outcomes in by_rank}
        assert len(scalars) == 1, overrides
        assert all(math.isfinite(value) and value > 0 for value in scalars.pop()), overrides
