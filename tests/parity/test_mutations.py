"""Each law broken on purpose: the parity table must turn red, or it proves nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.parity.harness import Outcome, one_rank, run_topology, train_on_this_rank
from tests.parity.test_topologies import ACCUMULATE, SHARD_2, check
from torchtrain.data.batch import Batch
from torchtrain.distributed import gradient_norm
from torchtrain.distributed.fsdp2 import manager
from torchtrain.testing.ranks import run_ranks
from torchtrain.trainer import step


def average_over_ranks(overrides: tuple[str, ...]) -> Outcome:
    """Divisor: torch's default, the mean over ranks, instead of the sum."""
    manager.set_sum_reduction = lambda module, divisor: None
    return train_on_this_rank(overrides)


def divide_by_local_tokens(overrides: tuple[str, ...]) -> Outcome:
    """Divisor: each micro-batch's own token count instead of the global one."""
    original = step.TrainStep._accumulate

    def accumulate(self: step.TrainStep, micro_batches: list[Batch], num_valid_tokens: int) -> object:
        return original(self, micro_batches, sum(batch.num_valid_tokens() for batch in micro_batches))

    step.TrainStep._accumulate = accumulate
    return train_on_this_rank(overrides)


def never_all_reduce(overrides: tuple[str, ...]) -> Outcome:
    """Reduce axis: HSDP without its all-reduce over replicas."""
    original = FSDPModule.set_requires_all_reduce
    FSDPModule.set_requires_all_reduce = lambda self, requires_all_reduce: original(self, False)
    return train_on_this_rank(overrides)


def count_replicas_in_norm(overrides: tuple[str, ...]) -> Outcome:
    """Norm: replicated elements counted once per replica."""
    gradient_norm._shard_groups = lambda gradient: tuple(gradient.device_mesh.get_all_groups())
    return train_on_this_rank(overrides)


def forget_unsynchronised_gradients(overrides: tuple[str, ...]) -> Outcome:
    """Accumulation: the last micro-batch does not reduce either."""
    original = FSDPModule.set_requires_gradient_sync
    FSDPModule.set_requires_gradient_sync = lambda self, requires_gradient_sync: original(self, False)
    return train_on_this_rank(overrides)


HSDP = (4, (SHARD_2, "training.micro_batch_size=2"))
MUTATIONS: dict[Callable[[tuple[str, ...]], Outcome], tuple[int, tuple[str, ...]]] = {
    average_over_ranks: (2, (SHARD_2, "training.micro_batch_size=4")),
    divide_by_local_tokens: (2, (SHARD_2, "training.micro_batch_size=4")),
    never_all_reduce: HSDP,
    count_replicas_in_norm: HSDP,
    forget_unsynchronised_gradients: (2, (SHARD_2, ACCUMULATE)),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_law_turns_the_table_red(mutation: Callable[[tuple[str, ...]], Outcome]) -> None:
    world_size, overrides = MUTATIONS[mutation]
    outcome = run_ranks(mutation, world_size, overrides)[0]
    with pytest.raises(AssertionError):
        check(outcome, one_rank("training.micro_batch_size=8"))


def test_unbroken_law_keeps_it_green() -> None:
    world_size, overrides = HSDP
    check(run_topology(world_size, *overrides), one_rank("training.micro_batch_size=8"))
