"""What FSDP really does on two ranks, read off a profiler trace: gathers, their order, and what stays gathered."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, make_global_batch
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.fsdp2.accumulation import set_micro_batch_policy
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

NUM_LAYERS = 4
LAYERS = (
    "model.overrides={vocab_size: 101, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 4, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}"
)
EVENT = re.compile(r"^FSDP::(pre_forward|pre_backward|all_gather|post_backward_reduce)(?: \((.*)\))?$")


def trace(*overrides: str) -> list[list[tuple[str, str]]]:
    """Per micro-batch, the (phase, unit) events of one step in issue order; the root's fqn is empty."""
    # One group per unit, as one event per unit is what these tests read.
    job = load_job(None, [*MODEL, LAYERS, "training.micro_batch_size=2", "fsdp_config.comm_fusion=true", *overrides])
    topology = Topology.resolve(job, dist.get_world_size())
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    model = build_model(Run(job, load_spec("llama"), architecture, meshes, is_main=False)).module
    batches = split_batch(make_global_batch(0, job.training.global_batch_size, 16), meshes.dp_rank, topology.dp_size, 2)
    traces = []
    for index, batch in enumerate(batches):
        set_micro_batch_policy(model, job.fsdp_config, is_last_micro_batch=index == len(batches) - 1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            PretrainTask().token_losses(model, batch).sum().backward()
        events = sorted(profiler.events(), key=lambda event: event.time_range.start)
        matches = [match for event in events if (match := EVENT.match(event.name))]
        traces.append([(match[1], match[2] or "") for match in matches])
    return traces


def gathered_while(events: list[tuple[str, str]], phase: str) -> dict[str, str]:
    """Unit gathered → unit whose ``phase`` hook was the last to start before that gather."""
    current, result = None, {}
    for name, unit in events:
        if name in ("pre_forward", "pre_backward"):
            current = (name, unit)
        elif name == "all_gather" and current is not None and current[0] == phase:
            result[unit] = current[1]
    return result


def layer(index: int) -> str:
    return f"layers.{index}"


ONE_MICRO_BATCH = "training.global_batch_size=4"
# Depths of forward and backward differ in every row, or one key could stand in for the other.
DEPTHS = [(0, 1), (1, 3), (3, 0)]
JOBS: dict[str, tuple[str, ...]] = {
    **{
        f"depths_{forward}_{backward}": (
            f"fsdp_config.forward_prefetch_depth={forward}",
            f"fsdp_config.backward_prefetch_depth={backward}",
            ONE_MICRO_BATCH,
        )
        for forward, backward in DEPTHS
    },
    "whole_after_forward": ("fsdp_config.reshard_after_forward=false", ONE_MICRO_BATCH),
    "recomputed": ("activation_checkpoint.mode=full", ONE_MICRO_BATCH),
    "whole_after_backward": ("fsdp_config.reshard_after_backward=false",),
    "defaults": (),
    "reduced_last": ("fsdp_config.requires_grad_sync=false",),
}
TRACES = SharedRanks(trace, {name: (2, ("fsdp_config.dp_shard_size=2", *words)) for name, words in JOBS.items()})


def traced(name: str) -> list[list[tuple[str, str]]]:
    return TRACES.results(name, list(JOBS))[0]


@pytest.mark.parametrize(("depth", "backward_depth"), DEPTHS)
def test_forward_prefetch_gathers_exactly_n_units_early(depth: int, backward_depth: int) -> None:
    (events,) = traced(f"depths_{depth}_{backward_depth}")
    order = ["", *(layer(i) for i in range(NUM_LAYERS))]
    expected = {unit: order[max(0, i - depth)] for i, unit in enumerate(order)}
    assert gathered_while(events, "pre_forward") == expected


@pytest.mark.parametrize(("forward_depth", "depth"), DEPTHS)
def test_backward_prefetch_gathers_exactly_n_units_early(forward_depth: int, depth: int) -> None:
    (events,) = traced(f"depths_{forward_depth}_{depth}")
    order = ["", *(layer(i) for i in reversed(range(NUM_LAYERS)))]
    # The root is still gathered from forward, so it gathers nothing itself.
    expected = {unit: order[max(0, i - depth)] for i, unit in enumerate(order) if unit}
    assert gathered_while(events, "pre_backward") == expected


@pytest.mark.parametrize(("forward_depth", "backward_depth"), DEPTHS)
def test_nothing_is_gathered_and_never_used(forward_depth: int, backward_depth: int) -> None:
    (events,) = traced(f"depths_{forward_depth}_{backward_depth}")
    gathers = Counter(unit for name, unit in events if name == "all_gather")
    assert gathers == {"": 1, **{layer(i): 2 for i in range(NUM_LAYERS)}}


def count(name: str) -> Callable[[list[tuple[str, str]]], int]:
    return lambda events: sum(event[0] == name for event in events)


gathers, reductions = count("all_gather"), count("post_backward_reduce")


def test_reshard_after_forward_false_gathers_each_unit_once() -> None:
    (events,) = traced("whole_after_forward")
    assert gathers(events) == NUM_LAYERS + 1


def test_full_recompute_gathers_no_more_than_backward_itself() -> None:
    (events,) = traced("recomputed")
    assert gathers(events) == 2 * NUM_LAYERS + 1


def test_reshard_after_backward_false_keeps_parameters_for_the_next_micro_batch() -> None:
    first, second = traced("whole_after_backward")
    assert gathers(first) == 2 * NUM_LAYERS + 1
    # Everything is still whole when the second forward begins; its forward reshards, its backward gathers again.
    assert gathers(second) == NUM_LAYERS


def test_reshard_after_backward_true_gathers_again() -> None:
    first, second = traced("defaults")
    assert gathers(first) == gathers(second) == 2 * NUM_LAYERS + 1


def test_requires_grad_sync_reduces_on_every_micro_batch() -> None:
    assert [reductions(events) for events in traced("defaults")] == [NUM_LAYERS + 1, NUM_LAYERS + 1]


def test_without_requires_grad_sync_only_the_last_micro_batch_reduces() -> None:
    assert [reductions(events) for events in traced("reduced_last")] == [0, NUM_LAYERS + 1]
