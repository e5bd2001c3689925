"""The parity table: loss, norm, every gradient and the weights after three steps, against one rank, in fp32."""

from __future__ import annotations

import pytest

from tests.parity.harness import Outcome, SharedTopologies, one_rank, run_topology
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_SCALAR, FP32_SCALAR, FP32_TENSOR

ACCUMULATE = "training.micro_batch_size=1"
SHARD_2 = "fsdp_config.dp_shard_size=2"
SHARD_4 = "fsdp_config.dp_shard_size=4"
WHOLE = "fsdp_config.replicate_params=[layers.0.mlp.up_proj.weight, '*norm.weight', embed_tokens.weight]"

CASES = {
    "fsdp2": (2, [SHARD_2, "training.micro_batch_size=4"]),
    "fsdp4_uneven": (4, [SHARD_4, "training.micro_batch_size=2"]),
    "hsdp_2x2": (4, [SHARD_2, "training.micro_batch_size=2"]),
    "replicate2": (2, ["training.micro_batch_size=4"]),
    "accumulate_sync_every": (2, [SHARD_2, ACCUMULATE, "fsdp_config.requires_grad_sync=true"]),
    "accumulate_sync_last": (2, [SHARD_2, ACCUMULATE, "fsdp_config.requires_grad_sync=false"]),
    "accumulate_keep_unsharded": (2, [SHARD_2, ACCUMULATE, "fsdp_config.reshard_after_backward=false"]),
    "accumulate_hsdp_sync_every": (4, [SHARD_2, ACCUMULATE]),
    "accumulate_hsdp_sync_last_keep": (
        4,
        [SHARD_2, ACCUMULATE, "fsdp_config.requires_grad_sync=false", "fsdp_config.reshard_after_backward=false"],
    ),
    "keep_after_forward": (2, [SHARD_2, ACCUMULATE, "fsdp_config.reshard_after_forward=false"]),
    "prefetch_0": (
        2,
        [SHARD_2, ACCUMULATE, "fsdp_config.forward_prefetch_depth=0", "fsdp_config.backward_prefetch_depth=0"],
    ),
    "prefetch_3": (
        2,
        [SHARD_2, ACCUMULATE, "fsdp_config.forward_prefetch_depth=3", "fsdp_config.backward_prefetch_depth=3"],
    ),
    "whole_parameters": (2, [SHARD_2, "training.micro_batch_size=4", WHOLE]),
    "whole_parameters_uneven": (4, [SHARD_4, "training.micro_batch_size=2", WHOLE]),
    "whole_parameters_hsdp_sync_every": (4, [SHARD_2, ACCUMULATE, WHOLE, "fsdp_config.forward_prefetch_depth=3"]),
    "whole_parameters_hsdp_sync_last": (
        4,
        [SHARD_2, ACCUMULATE, WHOLE, "fsdp_config.requires_grad_sync=false", "fsdp_config.backward_prefetch_depth=3"],
    ),
    "built_with_memory": (2, [SHARD_2, "training.micro_batch_size=4", "model.init_on_meta=false"]),
    "full_recompute": (2, [SHARD_2, "training.micro_batch_size=4", "activation_checkpoint.mode=full"]),
}

MUON = "optimizer._target_=torchtrain.optim.muon.Muon"
MUON_CASES = {
    "fsdp4_uneven": (4, [SHARD_4, "training.micro_batch_size=2"]),
    "hsdp_2x2": (4, [SHARD_2, "training.micro_batch_size=2"]),
    "whole_parameters_hsdp": (4, [SHARD_2, ACCUMULATE, WHOLE]),
    "zero_copy": (2, [SHARD_2, "training.micro_batch_size=4", "fsdp_config.comm_fusion=true"]),
}

TIED = (
    "model.overrides={vocab_size: 101, hidden_size: 30, intermediate_size: 37, num_hidden_layers: 1, "
    "num_attention_heads: 3, num_key_value_heads: 1, head_dim: 10, tie_word_embeddings: true}"
)


def check(actual: Outcome, expected: Outcome) -> None:
    for step, (ours, theirs) in enumerate(zip(actual.losses, expected.losses, strict=True), start=1):
        assert relative_error(ours, theirs) <= FP32_SCALAR, f"loss of step {step}: {ours} against {theirs}"
    for step, (ours, theirs) in enumerate(zip(actual.norms, expected.norms, strict=True), start=1):
        assert relative_error(ours, theirs) <= FP32_SCALAR, f"norm of step {step}: {ours} against {theirs}"
    assert len(actual.gradients) == len(expected.gradients) == 3
    for step, (ours, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True), start=1):
        assert ours.keys() == theirs.keys()
        for fqn, gradient in theirs.items():
            assert relative_error(ours[fqn], gradient) <= FP32_TENSOR, f"gradient of {fqn} in step {step}"
    assert actual.weights.keys() == expected.weights.keys()
    for fqn, weight in expected.weights.items():
        assert relative_error(actual.weights[fqn], weight) <= FP32_TENSOR, f"weight {fqn} after 3 steps"


RUNS = SharedTopologies(CASES)
MUON_RUNS = SharedTopologies({name: (size, (MUON, *overrides)) for name, (size, overrides) in MUON_CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_topology_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    check(RUNS.run(name, chosen_rows), one_rank("training.micro_batch_size=8"))


@pytest.mark.parametrize("name", MUON_CASES)
def test_muon_on_a_topology_equals_muon_on_one_rank(name: str, chosen_rows: list[str]) -> None:
    check(MUON_RUNS.run(name, chosen_rows), one_rank(MUON, "training.micro_batch_size=8"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_tied_head_and_single_layer_equal_one_rank(world_size: int) -> None:
    overrides = (TIED, "training.micro_batch_size=2", f"fsdp_config.dp_shard_size={world_size}")
    check(run_topology(world_size, *overrides), one_rank(TIED, "training.micro_batch_size=8"))


def test_bf16_follows_fp32() -> None:
    precision = ("mix_precision.param_dtype=bfloat16", "mix_precision.reduce_dtype=float32")
    low = run_topology(2, SHARD_2, "training.micro_batch_size=4", *(f"fsdp_config.{setting}" for setting in precision))
    full = one_rank("training.micro_batch_size=8")
    for ours, theirs in zip(low.losses, full.losses, strict=True):
        assert relative_error(ours, theirs) <= BF16_SCALAR
