"""``comm_fusion`` and ``comm_fusion_zero_copy`` in whole jobs: the same bits, and exactly so many collectives."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, Outcome, make_global_batch, train_on_this_rank
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

FUSIONS = {
    "off": ("fsdp_config.comm_fusion=false",),
    "copy-in": ("fsdp_config.comm_fusion=true", "fsdp_config.comm_fusion_zero_copy=false"),
    "zero copy": ("fsdp_config.comm_fusion=true",),
}
SHARD_2 = "fsdp_config.dp_shard_size=2"
SHARD_4 = "fsdp_config.dp_shard_size=4"
ONCE = "training.micro_batch_size=4"
TWICE = "training.micro_batch_size=2"
BF16 = "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}"

# Every size of the model is odd, so that shards are uneven everywhere and one rank of four has none of some parameters.
CASES = {
    "fsdp2": (2, [SHARD_2, ONCE]),
    "fsdp4": (4, [SHARD_4, TWICE]),
    "hsdp_2x2": (4, [SHARD_2, TWICE]),
    "hsdp_2x2_accumulated": (4, [SHARD_2, "training.micro_batch_size=1"]),
    "pure_replication": (2, [ONCE]),
    "reduced_every_micro_batch": (2, [SHARD_2, TWICE, "fsdp_config.requires_grad_sync=true"]),
    "reduced_last_micro_batch": (2, [SHARD_2, TWICE, "fsdp_config.requires_grad_sync=false"]),
    "whole_between_micro_batches": (2, [SHARD_2, TWICE, "fsdp_config.reshard_after_backward=false"]),
    "whole_until_backward": (2, [SHARD_2, ONCE, "fsdp_config.reshard_after_forward=false"]),
    "prefetch_0": (2, [SHARD_2, "fsdp_config={forward_prefetch_depth: 0, backward_prefetch_depth: 0}", ONCE]),
    "prefetch_3": (2, [SHARD_2, "fsdp_config={forward_prefetch_depth: 3, backward_prefetch_depth: 3}", ONCE]),
    "recomputed": (2, [SHARD_2, ONCE, "activation_checkpoint.mode=full"]),
    "tied_head": (2, [SHARD_2, ONCE, "model.overrides.tie_word_embeddings=true"]),
    "bf16": (2, [SHARD_2, ONCE, BF16]),
    "bf16_accumulated": (2, [SHARD_2, TWICE, BF16, "fsdp_config.requires_grad_sync=false"]),
    "bf16_storage": (2, [SHARD_2, ONCE, "model.init_dtype=bfloat16"]),
    "built_with_memory": (2, [SHARD_2, ONCE, "model.init_on_meta=false"]),
    "replicated_norms": (2, [SHARD_2, ONCE, "fsdp_config.replicate_params=['layers.*_layernorm.weight']"]),
}


def train_with_every_fusion(overrides: list[str]) -> None:
    first, *others = (train_on_this_rank((*overrides, *keys)) for keys in FUSIONS.values())
    for name, outcome in zip(list(FUSIONS)[1:], others, strict=True):
        assert_bitwise_equal(outcome, first, name)


def assert_bitwise_equal(actual: Outcome, expected: Outcome, name: str) -> None:
    assert actual.losses == expected.losses, name
    assert actual.norms == expected.norms, name
    assert_same_tensors(actual.weights, expected.weights, name)
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert_same_tensors(ours, theirs, name)


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], name: str) -> None:
    assert actual.keys() == expected.keys()
    assert [fqn for fqn, tensor in expected.items() if not torch.equal(actual[fqn], tensor)] == [], name


RUNS = SharedRanks(train_with_every_fusion, {case: (size, (overrides,)) for case, (size, overrides) in CASES.items()})


@pytest.mark.parametrize("case", CASES)
def test_fusion_and_zero_copy_change_no_bit_of_three_steps(case: str, chosen_rows: list[str]) -> None:
    RUNS.results(case, chosen_rows)


NUM_LAYERS = 2
PER_BLOCK, OUTSIDE = 9, 3
"""Parameters of a Llama block, and those of the root: embedding, last norm, head."""


def count_collectives(*overrides: str) -> dict[str, int]:
    """Collectives of one forward and backward, as the process groups saw them."""
    model, batch = build(*overrides)
    with CommDebugMode() as comms:
        PretrainTask().token_losses(model, batch).sum().backward()
    counts: dict[str, int] = {}
    for operation, count in comms.get_comm_counts().items():
        kind = next(kind for kind in ("allgather", "reduce_scatter", "allreduce") if kind in str(operation))
        counts[kind] = counts.get(kind, 0) + count
    return counts


def build(*overrides: str) -> tuple[torch.nn.Module, object]:
    job = load_job(None, [*MODEL, *overrides])
    topology = Topology.resolve(job, dist.get_world_size())
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    model = build_model(Run(job, load_spec("llama"), architecture, meshes, is_main=False)).module
    return model, split_batch(make_global_batch(0, 8, 16), meshes.dp_rank, topology.dp_size, 2)[0]


@pytest.mark.parametrize(
    ("fusion", "in_block", "in_root"),
    [("off", PER_BLOCK, OUTSIDE), ("copy-in", 1, 1), ("zero copy", 1, 1)],
)
def test_collectives_are_one_per_parameter_or_one_per_unit(fusion: str, in_block: int, in_root: int) -> None:
    (counts, _) = run_ranks(count_collectives, 2, SHARD_2, *FUSIONS[fusion])
    # The root stays whole after forward.
    assert counts == {
        "allgather": 2 * NUM_LAYERS * in_block + in_root,
        "reduce_scatter": NUM_LAYERS * in_block + in_root,
    }


@pytest.mark.parametrize(("fusion", "in_block", "in_root"), [("off", PER_BLOCK, OUTSIDE), ("zero copy", 1, 1)])
def test_replicas_add_one_all_reduce_for_each_reduce_scatter(fusion: str, in_block: int, in_root: int) -> None:
    counts = run_ranks(count_collectives, 4, SHARD_2, *FUSIONS[fusion])[0]
    assert counts["allreduce"] == counts["reduce_scatter"] == NUM_LAYERS * in_block + in_root


def count_copies(*overrides: str) -> dict[str, int]:
    """Operators inside the gathers of one forward that allocate, cast or copy."""
    model, batch = build(*overrides)
    PretrainTask().token_losses(model, batch).sum().backward()  # lays the buffers out
    with profile(activities=[ProfilerActivity.CPU]) as profiler, torch.no_grad():
        PretrainTask().token_losses(model, batch)
    events = profiler.events()
    gathers = [event for event in events if event.name.startswith("FSDP::all_gather") and "copy_out" not in event.name]
    counts = {"gathers": len(gathers)}
    for name in ("aten::empty", "aten::copy_", "aten::_foreach_copy_"):
        counts[name] = sum(event.name == name and is_inside(event, gathers) for event in events)
    return counts


def is_inside(event: object, spans: list) -> bool:
    here = operator.attrgetter("time_range.start")(event)
    return any(span.time_range.start <= here <= span.time_range.end and span.thread == event.thread for span in spans)


# Per gather. Of the allocations, one is gloo's and one the output; torch's cast goes through a buffer of its own.
@pytest.mark.parametrize(
    ("precision", "fusion", "expected"),
    [
        ("fp32", "copy-in", {"aten::empty": 2, "aten::_foreach_copy_": 1}),
        ("fp32", "zero copy", {"aten::empty": 2, "aten::_foreach_copy_": 0, "aten::copy_": 0}),
        ("bf16", "copy-in", {"aten::empty": 3, "aten::_foreach_copy_": 2}),
        ("bf16", "zero copy", {"aten::empty": 2, "aten::_foreach_copy_": 0, "aten::copy_": 1}),
    ],
)
def test_zero_copy_gathers_with_one_cast_or_none(precision: str, fusion: str, expected: dict[str, int]) -> None:
    overrides = [SHARD_2, *FUSIONS[fusion], *([BF16] if precision == "bf16" else [])]
    counts = run_ranks(count_copies, 2, *overrides)[0]
    gathers = counts.pop("gathers")
    assert gathers == NUM_LAYERS + 1
    assert {name: counts[name] / gathers for name in expected} == expected
