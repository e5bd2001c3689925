"""Pipeline stages as numbers: who gets which layers, where stages lie, and what a schedule asks of a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from models.registry import resolve_architecture
from torchtrain.config.load import read_job
from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.legality import find_legality_faults
from torchtrain.distributed.pipeline_parallel.split import measure_costs
from torchtrain.distributed.pipeline_parallel.stage_plan import (
    StageCosts,
    can_schedule,
    num_stages,
    plan_pipeline,
    rank_of_stage,
)
from torchtrain.distributed.topology import Topology, find_topology_faults, find_topology_warnings
from torchtrain.errors import Fault

SCHEDULES: tuple[PpSchedule, ...] = get_args(PpSchedule)
FREE = StageCosts(head=0.0, embedding=0.0)


def counts_of(schedule: PpSchedule, pp_size: int, num_layers: int, costs: StageCosts = FREE) -> list[int]:
    plan = plan_pipeline(schedule, pp_size=pp_size, num_layers=num_layers, costs=costs)
    return [len(stage.layers) for stage in plan.stages]


@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(0, 40), st.floats(0, 9), st.floats(0, 9))
@settings(max_examples=200, deadline=None)
def test_every_layer_is_in_one_stage_and_no_layer_can_move_to_a_cheaper_rank_or_stage_of_its_rank(
    schedule, pp_size, more, head, embedding
):
    num_layers = num_stages(schedule, pp_size) + more
    plan = plan_pipeline(schedule, pp_size=pp_size, num_layers=num_layers, costs=StageCosts(head, embedding))
    assert [layer for stage in plan.stages for layer in stage.layers] == list(range(num_layers))
    assert all(len(stage.layers) for stage in plan.stages)
    cost_of_rank = [sum(stage.cost for stage in plan.stages_of(rank)) for rank in range(pp_size)]
    for stage in plan.stages:
        if len(stage.layers) > 1:
            assert min(cost_of_rank) + 1 >= cost_of_rank[stage.pp_rank] - 1e-9
            assert min(other.cost for other in plan.stages_of(stage.pp_rank)) + 1 >= stage.cost - 1e-9
    assert sorted(stage.index for rank in range(pp_size) for stage in plan.stages_of(rank)) == list(
        range(len(plan.stages))
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("head", [0.0, 0.4, 1.0, 2.5, 4.0])
def test_no_other_split_has_a_cheaper_dearest_rank(schedule: PpSchedule, head: float) -> None:
    """By trying all splits of up to nine layers."""
    for pp_size in (2, 3):
        stages = num_stages(schedule, pp_size)
        for num_layers in range(stages, 10):
            plan = plan_pipeline(
                schedule, pp_size=pp_size, num_layers=num_layers, costs=StageCosts(head=head, embedding=head)
            )
            ours = dearest_rank(schedule, pp_size, [len(stage.layers) for stage in plan.stages], head)
            others = (dearest_rank(schedule, pp_size, counts, head) for counts in all_splits(stages, num_layers))
            assert ours <= min(others) + 1e-9, num_layers


def all_splits(stages: int, num_layers: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *cuts, num_layers)))


def dearest_rank(schedule: PpSchedule, pp_size: int, counts: Sequence[int], head: float) -> float:
    costs = [0.0] * pp_size
    for stage, count in enumerate(counts):
        costs[rank_of_stage(schedule, pp_size, stage)] += count + head * (stage == len(counts) - 1)
    return max(costs)


def test_a_head_that_costs_two_layers_takes_their_place() -> None:
    assert counts_of("1F1B", 2, 8, StageCosts(head=2.0, embedding=2.0)) == [5, 3]


def test_an_embedding_decides_only_between_equally_fast_splits() -> None:
    assert counts_of("1F1B", 2, 7, StageCosts(head=0.0, embedding=3.0)) == [3, 4]
    assert counts_of("1F1B", 2, 7, StageCosts(head=0.5, embedding=3.0)) == [4, 3]


def test_a_rank_that_holds_the_head_gets_its_spare_layers_last() -> None:
    # Stages 0 and 3 of the V are on rank 0.
    assert counts_of("ZBVZeroBubble", 2, 6, StageCosts(head=1.0, embedding=0.0)) == [1, 2, 2, 1]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("GPipe", [0, 1, 2]),
        ("1F1B", [0, 1, 2]),
        ("LoopedBFS", [0, 1, 2, 0, 1, 2]),
        ("Interleaved1F1B", [0, 1, 2, 0, 1, 2]),
        ("InterleavedZeroBubble", [0, 1, 2, 0, 1, 2]),
        ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0]),
        ("DualPipeV", [0, 1, 2, 2, 1, 0]),
    ],
)
def test_stages_lie_in_a_row_in_loops_or_in_a_v(schedule: PpSchedule, ranks: list[int]) -> None:
    assert [rank_of_stage(schedule, 3, stage) for stage in range(num_stages(schedule, 3))] == ranks


def test_costs_of_the_numbers_are_those_of_the_model() -> None:
    from models.llama.model import build_llama

    architecture = resolve_architecture("llama", "debug", {})
    with torch.device("meta"):
        measured = measure_costs(build_llama(architecture))
    assert measured == StageCosts.of(
        num_matmul_parameters=architecture.num_matmul_parameters,
        num_layers=architecture.num_hidden_layers,
        vocab_size=architecture.vocab_size,
        hidden_size=architecture.hidden_size,
    )


def test_the_log_line_names_every_stage() -> None:
    plan = plan_pipeline("1F1B", pp_size=2, num_layers=3, costs=StageCosts(head=1.5, embedding=1.5))
    assert plan.describe() == (
        "pipeline of 2 stages, schedule 1F1B: 0 on rank 0: embedding + layers 0-1 (cost 2.00); "
        "1 on rank 1: layers 2-2 + head (cost 2.50)"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_torch_builds_every_schedule_that_is_said_to_be_possible_and_no_interleaved_one_that_is_not(schedule) -> None:
    logging.disable(logging.CRITICAL)
    try:
        for pp_size in (2, 3):
            for count in range(1, 3 * pp_size + 2):
                is_built = _torch_builds(schedule, pp_size, count)
                if can_schedule(schedule, pp_size, count):
                    assert is_built, (pp_size, count)
                elif count >= pp_size:
                    assert not is_built, (pp_size, count)
    finally:
        logging.disable(logging.NOTSET)


def _torch_builds(schedule: PpSchedule, pp_size: int, num_micro_batches: int) -> bool:
    stages = num_stages(schedule, pp_size)
    mine = [
        SimpleNamespace(
            stage_index=index,
            num_stages=stages,
            group_rank=0,
            group_size=pp_size,
            is_first=index == 0,
            is_last=index == stages - 1,
            submod=torch.nn.Identity(),
        )
        for index in range(stages)
        if rank_of_stage(schedule, pp_size, index) == 0
    ]
    kind = get_schedule_class(schedule)
    try:
        kind(mine if issubclass(kind, PipelineScheduleMulti) else mine[0], num_micro_batches, loss_fn=lambda *_: None)
    except ValueError:
        return False
    return True


def faults_of(*overrides: str, world_size: int | None = None) -> list[Fault]:
    reading = read_job(None, ["accelerator.pp_size=2", *overrides])
    assert reading.faults == ()
    if world_size is not None:
        return find_topology_faults(reading.job, world_size)
    architecture = resolve_architecture("llama", "debug", reading.job.model.overrides)
    return find_legality_faults(architecture, reading.job, family="llama", unsupported={})


def only_fault(*overrides: str, world_size: int | None = None) -> str:
    (fault,) = faults_of(*overrides, world_size=world_size)
    return str(fault)


def test_tied_embeddings_are_refused_with_the_reason() -> None:
    said = only_fault("model.overrides={tie_word_embeddings: true}")
    assert "embedding and head lie on different stages" in said
    assert "tie_word_embeddings: false" in said


def test_fewer_layers_than_stages_are_refused_with_the_legal_size() -> None:
    assert "use 4 or fewer" in only_fault("accelerator.pp_size=5")
    said = only_fault("accelerator.pp_size=3", "accelerator.pp_schedule=Interleaved1F1B")
    assert "makes 6 stages" in said
    assert "use 2 or fewer, or accelerator.pp_schedule: 1F1B" in said


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("[4]", "must have one entry for each of the 2 stages of 1F1B"),
        ("[4, 0]", "must give each stage a layer"),
        ("[3, 2]", "must add up to the model's 4 layers, but adds up to 5; use for example [2, 2]"),
    ],
)
def test_a_layer_list_that_does_not_fit_is_refused_with_one_that_does(layers: str, said: str) -> None:
    assert said in only_fault(f"accelerator.pp_layers={layers}")


def test_a_layer_list_is_followed() -> None:
    assert faults_of("accelerator.pp_layers=[1, 3]") == []
    plan = plan_pipeline("1F1B", pp_size=2, num_layers=4, costs=FREE, pp_layers=(1, 3))
    assert [list(stage.layers) for stage in plan.stages] == [[0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("schedule", "batch", "said"),
    [
        ("1F1B", 4, "makes 1 pipeline micro-batch (4 / (pp_micro_batch_size 4 x dp_size 1)), but 1F1B needs at least"),
        ("1F1B", 4, "use 8, or set accelerator.pp_micro_batch_size to 2"),
        ("DualPipeV", 12, "DualPipeV needs at least one for each of its 4 stages; use 16, or set"),
        (
            "Interleaved1F1B",
            20,
            "a whole number of equal rounds of at least accelerator.pp_size = 2 of them; use 16 or 24",
        ),
        ("ZBVZeroBubble", 4, "needs at least one for each of accelerator.pp_size = 2 ranks"),
    ],
)
def test_a_batch_that_a_schedule_cannot_run_is_refused_with_the_next_ones(schedule: str, batch: int, said: str) -> None:
    batches = (f"training.global_batch_size={batch}", "training.micro_batch_size=4")
    assert said in only_fault(f"accelerator.pp_schedule={schedule}", *batches, world_size=2)


@pytest.mark.parametrize("word", ["compile.enabled=true", "activation_checkpoint.mode=selective_op"])
def test_what_cannot_run_backward_in_two_parts_is_refused_with_schedules_that_do(word: str) -> None:
    said = only_fault(word, "accelerator.pp_schedule=DualPipeV")
    assert "for inputs and for weights apart" in said
    assert word.partition("=")[0] in said
    assert faults_of(word, "accelerator.pp_schedule=Interleaved1F1B") == []


def test_micro_batches_are_counted_as_the_pipeline_cuts_them() -> None:
    words = ["training.global_batch_size=16", "training.micro_batch_size=4", "accelerator.pp_micro_batch_size=2"]
    piped, plain = (read_job(None, [f"accelerator.pp_size={size}", *words]).job for size in (2, 1))
    assert Topology.resolve(piped, 4).backward_passes(piped) == 4
    assert Topology.resolve(plain, 2).backward_passes(plain) == 2


def test_keys_that_a_pipeline_overrules_are_named_once_each() -> None:
    words = [f"fsdp_config.{name}=false" for name in ("reshard_after_forward", "requires_grad_sync")]
    job = read_job(None, ["accelerator.pp_size=2", "training.global_batch_size=8", *words]).job
    warnings = find_topology_warnings(job, Topology.resolve(job, 4))
    assert [warning.split(":")[0] for warning in warnings] == [word.split("=")[0] for word in words]
