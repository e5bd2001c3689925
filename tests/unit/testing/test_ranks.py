import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from torchtrain.testing.ranks import run_ranks


def sum_ranks(offset):
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return total, torch.get_num_threads(), os.environ["RANK"]


def fail_on_one_rank(guilty):
    if dist.get_rank() == guilty:
        raise ValueError("the root cause")
    dist.barrier()


def fail_everywhere():
    raise ValueError("everyone's fault")


def fail_late_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(0.3)
        raise RuntimeError("a consequence")
    raise ValueError("the root cause")


def hang_on_one_rank(guilty):
    while dist.get_rank() == guilty:
        time.sleep(0.1)


def die_on_one_rank(guilty):
    if dist.get_rank() == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_every_rank_answers_from_one_group(world_size):
    results = run_ranks(sum_ranks, world_size, offset=1)
    assert [rank for _, _, rank in results] == [str(rank) for rank in range(world_size)]
    for total, num_threads, _ in results:
        assert total == world_size * (world_size + 1) / 2
        assert num_threads == 1


def test_failure_on_one_rank_shows_its_traceback_and_names_the_waiting_ranks():
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_on_one_rank, 4, 2)
    message = str(caught.value)
    assert message.startswith("rank 2:\nTraceback")
    assert "ValueError: the root cause" in message
    assert "ranks 0, 1, 3: still running" in message


def test_equal_tracebacks_are_shown_once():
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_everywhere, 2)
    assert str(caught.value).startswith("ranks 0, 1:\n")
    assert str(caught.value).count("Traceback") == 1


def test_the_earliest_failure_comes_first():
    with pytest.raises(AssertionError) as caught:
        run_ranks(fail_late_on_rank_0, 2)
    message = str(caught.value)
    assert message.index("the root cause") < message.index("a consequence")


def test_a_hang_is_killed_and_the_silent_rank_shows_where_it_stands():
    with pytest.raises(AssertionError, match="rank 1: did not answer in 6 s") as caught:
        run_ranks(hang_on_one_rank, 2, 1, timeout_s=6)
    assert "hang_on_one_rank" in str(caught.value)


def test_a_dead_rank_is_reported_with_its_signal():
    with pytest.raises(AssertionError) as caught:
        run_ranks(die_on_one_rank, 2, 0)
    assert str(caught.value).startswith("rank 0:\ndied: killed by SIGKILL")
