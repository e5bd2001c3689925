"""Forward passes of a pipeline under the strictest network: a send lasts until its receiver stands at that receive."""

from __future__ import annotations

from typing import get_args

import pytest

from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.pipeline_parallel.forward_order import ForwardAction, plan_forward
from torchtrain.distributed.pipeline_parallel.stage_plan import num_stages, rank_of_stage


def queues_of(schedule: PpSchedule, pp_size: int, num_micro_batches: int) -> list[list[ForwardAction]]:
    return [
        list(plan_forward(schedule, pp_size=pp_size, pp_rank=rank, num_micro_batches=num_micro_batches))
        for rank in range(pp_size)
    ]


def walk(queues: list[list[ForwardAction]]) -> list[tuple[int, int]]:
    """Let every rank go on until none can; returns what was computed, (stage, micro-batch), in order."""
    arrived: set[tuple[int, int]] = set()
    computed: list[tuple[int, int]] = []
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, queue in enumerate(queues):
            if not queue:
                continue
            action = queue[0]
            stage, number = action.stage, action.micro_batch
            if action.kind == "compute":
                assert stage == 0 or {(stage - 1, number)} & (arrived | set(computed)), action
                computed.append((stage, number))
                queue.pop(0)
                goes_on = True
            elif action.peer is not None and action.kind == "send":
                assert (stage, number) in computed
                theirs = queues[action.peer][0] if queues[action.peer] else None
                if theirs == ForwardAction("receive", stage + 1, number, rank):
                    arrived.add((stage, number))
                    queue.pop(0)
                    queues[action.peer].pop(0)
                    goes_on = True
    return computed


@pytest.mark.parametrize("schedule", get_args(PpSchedule))
@pytest.mark.parametrize("pp_size", [2, 3, 4])
def test_no_rank_waits_forever_and_every_stage_computes_every_micro_batch_once(
    schedule: PpSchedule, pp_size: int
) -> None:
    for num_micro_batches in range(1, 9):
        queues = queues_of(schedule, pp_size, num_micro_batches)
        computed = walk(queues)
        assert queues == [[] for _ in range(pp_size)], num_micro_batches
        stages = range(num_stages(schedule, pp_size))
        assert sorted(computed) == [(stage, number) for stage in stages for number in range(num_micro_batches)]


def test_with_one_stage_a_rank_each_micro_batch_is_handed_on_at_once() -> None:
    (_, middle, _) = queues_of("1F1B", 3, 2)
    assert [action.kind for action in middle] == ["receive", "compute", "send"] * 2


def test_ranks_that_each_send_before_they_receive_are_seen_to_wait_forever() -> None:
    queues = queues_of("Interleaved1F1B", 2, 2)
    for rank, queue in enumerate(queues):
        assert all(rank_of_stage("Interleaved1F1B", 2, action.stage) == rank for action in queue)
    # The second stage of rank 0 hands on at once, as the only stage of a rank would.
    first, last = queues[0][:-6], queues[0][-6:]
    at_once = sorted(last, key=lambda action: action.micro_batch)
    assert at_once != last
    queues[0] = first + at_once
    walk(queues)
    assert queues[0]
    assert queues[1]
