"""Pipelines against one rank: every schedule, with FSDP and HSDP, and what must turn the comparison red."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from tests.parity import harness
from tests.parity.harness import Outcome, SharedTopologies, merge_stages, one_rank, run_topology, train_on_this_rank
from tests.parity.test_topologies import SHARD_2, check
from torchtrain.distributed.pipeline_parallel import schedule
from torchtrain.distributed.pipeline_parallel.stage_plan import SPLIT_BACKWARD
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import BF16_SCALAR, EXACT
from torchtrain.trainer import step

PP_2 = "accelerator.pp_size=2"
# As many layers as stages of the looped schedules, and one: stages are unequal.
MODEL = (
    "model.overrides={vocab_size: 101, hidden_size: 30, intermediate_size: 37, num_hidden_layers: 5, "
    "num_attention_heads: 3, num_key_value_heads: 1, head_dim: 10, tie_word_embeddings: false}"
)
ONE_BY_ONE = "training.micro_batch_size=1"
WHOLE = "fsdp_config.replicate_params=[layers.0.mlp.up_proj.weight, '*norm.weight', lm_head.weight]"

CASES = {
    "1f1b": (2, []),
    "gpipe": (2, ["accelerator.pp_schedule=GPipe"]),
    "interleaved": (2, ["accelerator.pp_schedule=Interleaved1F1B", "activation_checkpoint.mode=full"]),
    "zero_bubble": (2, ["accelerator.pp_schedule=InterleavedZeroBubble", "activation_checkpoint.mode=full"]),
    "v_zero_bubble": (2, ["accelerator.pp_schedule=ZBVZeroBubble", "training.loss_chunk_size=7"]),
    "dual_pipe": (2, ["accelerator.pp_schedule=DualPipeV"]),
    "micro_batches_within_micro_batches": (2, ["training.micro_batch_size=4", "accelerator.pp_micro_batch_size=2"]),
    "layer_list": (2, ["accelerator.pp_layers=[4, 1]"]),
    "four_stages": (4, ["accelerator.pp_size=4"]),
    "fsdp": (4, [SHARD_2, "fsdp_config.comm_fusion=true"]),
    "replicas": (4, ["fsdp_config.dp_shard_size=1"]),
    "hsdp": (8, [SHARD_2]),
    "v_fsdp": (4, [SHARD_2, "accelerator.pp_schedule=ZBVZeroBubble", WHOLE]),
    "loops_fsdp": (4, [SHARD_2, "accelerator.pp_schedule=Interleaved1F1B", "fsdp_config.comm_fusion=true"]),
    "looped_bfs_built_with_memory": (2, ["accelerator.pp_schedule=LoopedBFS", "model.init_on_meta=false"]),
}


EVEN_MODEL = (
    "model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 36, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}"
)
COMPOSED = {
    "tensor": (4, ["accelerator.tp_size=2"]),
    "sequence_and_loss": (4, ["accelerator={tp_size: 2, sequence_parallel: true, loss_parallel: true}"]),
    "ring_in_a_v": (4, ["accelerator={cp_size: 2, cp_mode: ring, pp_schedule: ZBVZeroBubble}"]),
    "everything": (
        8,
        [
            "accelerator={tp_size: 2, cp_size: 2, cp_mode: allgather, sequence_parallel: true, loss_parallel: true}",
            "accelerator.pp_schedule=InterleavedZeroBubble",
            "training.loss_chunk_size=3",
            SHARD_2,
        ],
    ),
}


def reference() -> Outcome:
    return one_rank(MODEL, "training.micro_batch_size=8")


RUNS = SharedTopologies(
    {name: (size, (MODEL, PP_2, ONE_BY_ONE, *overrides)) for name, (size, overrides) in CASES.items()}
)
COMPOSED_RUNS = SharedTopologies(
    {name: (size, (EVEN_MODEL, PP_2, ONE_BY_ONE, *overrides)) for name, (size, overrides) in COMPOSED.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_pipeline_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    check(RUNS.run(name, chosen_rows), reference())


@pytest.mark.parametrize("name", COMPOSED)
def test_pipeline_of_parallel_stages_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    check(COMPOSED_RUNS.run(name, chosen_rows), one_rank(EVEN_MODEL, "training.micro_batch_size=8"))


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ("accelerator.pp_schedule=ZBVZeroBubble",)),
        (4, (SHARD_2, "fsdp_config.mix_precision.reduce_dtype=float32")),
        (4, (SHARD_2, "fsdp_config.mix_precision={output_dtype: float32, reduce_dtype: float32}")),
    ],
    ids=["autocast", "fsdp", "fp32_between_stages"],
)
def test_bf16_pipeline_follows_fp32(world_size: int, overrides: tuple[str, ...]) -> None:
    low = ("training.micro_batch_size=2", "fsdp_config.mix_precision.param_dtype=bfloat16")
    outcome = run_topology(world_size, MODEL, PP_2, *overrides, *low)
    for ours, theirs in zip(outcome.losses, reference().losses, strict=True):
        assert relative_error(ours, theirs) <= BF16_SCALAR
    assert all(math.isfinite(norm) for norm in outcome.norms)


LOW = ("fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}", "training.global_batch_size=16")


def first_gradients(schedules: tuple[str, ...]) -> list[dict[str, Tensor]]:
    """Of one step of eight micro-batches by each schedule, on the same ranks."""
    harness.NUM_STEPS = 1
    jobs = [(EVEN_MODEL, PP_2, SHARD_2, ONE_BY_ONE, *LOW, f"accelerator.pp_schedule={name}") for name in schedules]
    return [train_on_this_rank(job).gradients[0] for job in jobs]


def test_gradients_of_micro_batches_are_added_in_fp32_whatever_the_schedule() -> None:
    """EXACT: bf16 gradients of the same micro-batches, added to the same fp32 sum in the same order."""
    schedules = ("1F1B", *SPLIT_BACKWARD)
    by_rank = run_ranks(first_gradients, 4, schedules)
    plain, *split = [
        {fqn: gradient for gradients in by_rank for fqn, gradient in gradients[index].items()}
        for index in range(len(schedules))
    ]
    for name, gradients in zip(SPLIT_BACKWARD, split, strict=True):
        assert gradients.keys() == plain.keys()
        for fqn, gradient in gradients.items():
            assert relative_error(gradient, plain[fqn]) <= EXACT, (name, fqn)


def test_fp32_main_gradients_equal_one_rank() -> None:
    """A low-precision pipeline with fp32 mains against the same job on one rank."""
    mains = (
        "model.init_dtype=bfloat16",
        "optimizer.fp32_main_params=true",
        "fsdp_config.mix_precision={fp32_main_grad: true, reduce_dtype: float32}",
    )
    ours = run_topology(4, MODEL, PP_2, SHARD_2, ONE_BY_ONE, *mains)
    theirs = one_rank(MODEL, ONE_BY_ONE, *mains)
    for name in ("losses", "norms"):
        for mine, reference in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert relative_error(mine, reference) <= BF16_SCALAR
    assert all(gradient.dtype.itemsize == 4 for gradient in ours.gradients[0].values())


def test_muon_equals_one_rank() -> None:
    """Owners of matrices are ranks of one stage; the pattern of the embedding matches on the first stage only."""
    muon = (
        "optimizer._target_=torchtrain.optim.muon.Muon",
        "optimizer.options={adamw_params: [embed_tokens.weight, lm_head.weight, '*norm.weight']}",
    )
    check(run_topology(4, MODEL, PP_2, SHARD_2, ONE_BY_ONE, *muon), one_rank(MODEL, ONE_BY_ONE, *muon))


def divide_by_micro_batches(overrides: tuple[str, ...]) -> Outcome:
    """Divisor: torch's default, gradients divided by the number of micro-batches."""
    original = schedule.get_schedule_class

    def keep_default(name: str) -> Any:
        kind = original(name)
        scaled = type(kind.__name__, (kind,), {})
        scaled.__init__ = lambda self, stages, *, scale_grads, **options: kind.__init__(self, stages, **options)
        return scaled

    schedule.get_schedule_class = keep_default
    return train_on_this_rank(overrides)


def norm_of_one_stage(overrides: tuple[str, ...]) -> Outcome:
    """Norm: each stage clips by its own."""
    original = step.global_gradient_norm
    step.global_gradient_norm = lambda parameters, device, *, pp_group: original(parameters, device)
    return train_on_this_rank(overrides)


def never_reduce(overrides: tuple[str, ...]) -> Outcome:
    """Reduction: the one after the last micro-batch does not happen between replicas."""
    original = FSDPModule.set_requires_gradient_sync
    FSDPModule.set_requires_gradient_sync = lambda self, requires_gradient_sync: (
        original(self, requires_gradient_sync),
        self.set_requires_all_reduce(False),
    )
    return train_on_this_rank(overrides)


MUTATIONS: dict[Callable[[tuple[str, ...]], Outcome], tuple[int, tuple[str, ...]]] = {
    divide_by_micro_batches: (2, ()),
    norm_of_one_stage: (2, ()),
    never_reduce: (4, ("fsdp_config.dp_shard_size=1",)),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_pipeline_turns_the_comparison_red(mutation: Callable[[tuple[str, ...]], Outcome]) -> None:
    world_size, overrides = MUTATIONS[mutation]
    outcomes = run_ranks(mutation, world_size, (MODEL, PP_2, ONE_BY_ONE, *overrides))
    with pytest.raises(AssertionError):
        check(merge_stages(outcomes), reference())
