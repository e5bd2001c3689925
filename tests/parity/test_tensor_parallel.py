"""Tensor, sequence and loss parallel against one rank: loss, norm, every gradient and the weights after three steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from tests.parity.harness import Outcome, SharedTopologies, one_rank, run_topology, train_on_this_rank
from tests.parity.test_topologies import check
from torchtrain import parallelize
from torchtrain.distributed.tensor_parallel import vocabulary_loss
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import BF16_SCALAR
from torchtrain.trainer import step

# Four query heads to a key/value head; a vocabulary that no size divides; 19 feed-forward rows to share after tp 2.
GROUPED = (
    "model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 38, num_hidden_layers: 2, "
    "num_attention_heads: 8, num_key_value_heads: 2, head_dim: 4, tie_word_embeddings: false}"
)
# Key biases have gradients near AdamW's default epsilon, where its update is nothing but their rounding.
BIASED = (
    "model.overrides={vocab_size: 101, hidden_size: 30, intermediate_size: 38, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, head_dim: 10, tie_word_embeddings: true, attention_bias: true}",
    "optimizer.eps=1e-4",
)
QWEN2 = (
    "model.name=qwen2",
    "model.overrides={vocab_size: 101, hidden_size: 30, intermediate_size: 38, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, head_dim: 10, tie_word_embeddings: true}",
    "optimizer.eps=1e-4",
)
TP = "accelerator.tp_size=2"
SP = "accelerator.sequence_parallel=true"
LP = "accelerator.loss_parallel=true"
SHARD_2 = "fsdp_config.dp_shard_size=2"
MICRO_2 = "training.micro_batch_size=2"
SYNC_LAST = "fsdp_config.requires_grad_sync=false"

CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "tp2": (2, (GROUPED,), (TP,)),
    "tp2_sp_accumulate": (2, BIASED, (TP, SP, MICRO_2)),
    "tp2_lp_tied": (2, BIASED, (TP, LP, "training.loss_chunk_size=7")),
    "tp2_sp_lp": (2, (GROUPED,), (TP, SP, LP, "training.loss_chunk_size=1000")),
    "fsdp2_tp2_tied": (4, BIASED, (SHARD_2, TP)),
    "fsdp2_tp2_qwen2": (4, QWEN2, (SHARD_2, TP, SP)),
    "fsdp2_tp2_sp_sync_every": (4, (GROUPED,), (SHARD_2, TP, SP, MICRO_2)),
    "fsdp2_tp2_sp_lp_sync_last": (4, BIASED, (SHARD_2, TP, SP, LP, MICRO_2, SYNC_LAST)),
    "replicate2_tp2_sp_lp": (4, (GROUPED,), (TP, SP, LP, MICRO_2, "training.loss_chunk_size=5")),
    "hsdp_2x2_tp2_sp_lp": (8, BIASED, (SHARD_2, TP, SP, LP, "training.micro_batch_size=1")),
    "tp2_recompute": (2, (GROUPED,), (TP, SP, "activation_checkpoint.mode=selective_op")),
    "compiled": (2, (GROUPED,), (TP, SP, "compile.enabled=true", "compile.backend=aot_eager")),
    "whole_parameters": (
        4,
        BIASED,
        (SHARD_2, TP, SP, MICRO_2, "fsdp_config.replicate_params=['*up_proj.weight', '*norm.weight', '*o_proj.bias']"),
    ),
    "zero_copy": (
        4,
        (GROUPED,),
        (SHARD_2, TP, SP, "fsdp_config.comm_fusion=true", "fsdp_config.comm_fusion_zero_copy=true"),
    ),
    "built_with_memory": (4, BIASED, (SHARD_2, TP, "model.init_on_meta=false")),
    "chunked_loss_without_tp": (2, (GROUPED,), (SHARD_2, "training.loss_chunk_size=6")),
    "muon": (4, (GROUPED, "optimizer._target_=torchtrain.optim.muon.Muon"), (SHARD_2, TP, SP)),
}


def with_batch(world_size: int, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Let one micro-batch be all sequences of a rank, unless a case says otherwise."""
    num_groups = world_size // (2 if TP in overrides else 1)
    return (f"training.micro_batch_size={8 // num_groups}", *overrides)


RUNS = SharedTopologies(
    {name: (size, (*model, *with_batch(size, overrides))) for name, (size, model, overrides) in CASES.items()}
)


@pytest.mark.parametrize("name", CASES)
def test_tensor_parallel_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    _, model, _ = CASES[name]
    check(RUNS.run(name, chosen_rows), one_rank(*model, "training.micro_batch_size=8"))


LOW_PRECISION = ("fsdp_config.mix_precision.param_dtype=bfloat16", "fsdp_config.mix_precision.reduce_dtype=float32")
MAIN = ("model.init_dtype=bfloat16", "optimizer.fp32_main_params=true", "fsdp_config.mix_precision.fp32_main_grad=true")


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [(4, (SHARD_2, TP, SP, LP)), (4, (SHARD_2, TP, SP, LP, MICRO_2, SYNC_LAST, *MAIN)), (2, (TP, SP, LP, *MAIN))],
    ids=["fsdp2_tp2", "main_gradients", "autocast_main_gradients"],
)
def test_bf16_follows_fp32(world_size: int, overrides: tuple[str, ...]) -> None:
    low = run_topology(world_size, GROUPED, *with_batch(world_size, overrides), *LOW_PRECISION)
    full = one_rank(GROUPED, "training.micro_batch_size=8")
    for ours, theirs in zip(low.losses, full.losses, strict=True):
        assert relative_error(ours, theirs) <= BF16_SCALAR


def leave_norm_gradients_partial(overrides: tuple[str, ...]) -> Outcome:
    """Reduce axis: each rank's norm weights learn from its own tokens only."""
    step.sum_partial_gradients = lambda model, tp_mesh: None
    return train_on_this_rank(overrides)


def add_bias_on_every_rank(overrides: tuple[str, ...]) -> Outcome:
    """Row-parallel layers: each of two ranks adds the bias to its partial output."""
    original = parallelize.apply_tensor_parallel

    def add_again(module: nn.Linear, inputs: Any, output: Tensor) -> Tensor:
        assert isinstance(module.bias, DTensor)
        return output + module.bias.to_local()

    def apply_tensor_parallel(model: nn.Module, *arguments: Any) -> nn.Module:
        model = original(model, *arguments)
        for block in model.layers.values():
            block.self_attn.o_proj.register_forward_hook(add_again)
        return model

    parallelize.apply_tensor_parallel = apply_tensor_parallel
    return train_on_this_rank(overrides)


def keep_head_input_gradient_local(overrides: tuple[str, ...]) -> Outcome:
    """Loss on shards: the gradient of the head's input comes from this rank's classes only."""
    vocabulary_loss.Partial = Replicate
    return train_on_this_rank(overrides)


MUTATIONS: dict[Callable[[tuple[str, ...]], Outcome], tuple[str, ...]] = {
    leave_norm_gradients_partial: (TP, SP),
    add_bias_on_every_rank: (TP,),
    keep_head_input_gradient_local: (TP, LP),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_law_turns_the_table_red(mutation: Callable[[tuple[str, ...]], Outcome]) -> None:
    overrides = (*BIASED, "training.micro_batch_size=8")
    outcome = run_ranks(mutation, 2, (*overrides, *MUTATIONS[mutation]))[0]
    with pytest.raises(AssertionError):
        check(outcome, one_rank(*overrides))
