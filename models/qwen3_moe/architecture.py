"""The shape of a Qwen3 with experts, in Hugging Face's words, with the published sizes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section
from torchtrain.distributed.fsdpturbo.legality import FSDPTurboModel
from torchtrain.distributed.legality import Technique
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import (
    DECODER_COUNTS,
    architecture_fault,
    count_attention_parameters,
    count_feed_forward_parameters,
    find_attention_faults,
    find_sign_faults,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeArchitecture(Section):
    """Every number that the parameters, the forward and the balance of a Qwen3 with experts depend on.

    What balances the load stands here, not in ``training``: Hugging Face keeps its coefficient here too, the published
    value belongs to the size, and the bias, where there is one, is part of the model's state.
    """

    vocab_size: int = 151_936
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int = 0
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001
    router_aux_loss_scope: Literal["sequence", "batch"] = "sequence"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def has_experts(self, layer: int) -> bool:
        """Say whether a layer, counted from 0, is one with experts; the others are dense."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_hidden_layers))

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with, of the experts those that it visits; see ``nn.flops``."""
        router = self.hidden_size * self.num_experts
        visited = self.num_experts_per_tok * count_feed_forward_parameters(self.hidden_size, self.moe_intermediate_size)
        shared = count_feed_forward_parameters(self.hidden_size, self.shared_expert_intermediate_size)
        shared_gate = self.hidden_size if self.shared_expert_intermediate_size else 0
        sparse = self.num_sparse_layers * (router + visited + shared + shared_gate)
        num_dense = self.num_hidden_layers - self.num_sparse_layers
        dense = num_dense * count_feed_forward_parameters(self.hidden_size, self.intermediate_size)
        attention = self.num_hidden_layers * count_attention_parameters(self)
        return attention + sparse + dense + self.vocab_size * self.hidden_size


def find_architecture_faults(architecture: Qwen3MoeArchitecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    counts = (*DECODER_COUNTS, "moe_intermediate_size", "num_experts", "num_experts_per_tok", "decoder_sparse_step")
    return [
        *find_sign_faults(architecture, counts=counts),
        *find_attention_faults(architecture),
        *_expert_faults(architecture),
        *_balance_faults(architecture),
    ]


def _expert_faults(architecture: Qwen3MoeArchitecture) -> Iterator[Fault]:
    choices, experts = architecture.num_experts_per_tok, architecture.num_experts
    if choices > experts >= 1:
        rule = f"must not exceed num_experts = {experts}"
        yield architecture_fault("num_experts_per_tok", choices, rule, f"use {experts} or fewer")
    if architecture.shared_expert_intermediate_size < 0:
        value = architecture.shared_expert_intermediate_size
        yield architecture_fault("shared_expert_intermediate_size", value, "must be at least 0", "use 0 for none")
    layers = architecture.num_hidden_layers
    absent = [layer for layer in architecture.mlp_only_layers if not 0 <= layer < layers]
    if absent and layers >= 1:
        rule = f"must hold layers from 0 to {layers - 1}, which {', '.join(map(str, absent))} is not"
        yield architecture_fault("mlp_only_layers", list(architecture.mlp_only_layers), rule, "remove it")
    elif layers >= 1 and architecture.decoder_sparse_step >= 1 and architecture.num_sparse_layers == 0:
        rule = f"must leave a layer its experts, with num_hidden_layers = {layers}"
        at_fault = "mlp_only_layers" if architecture.mlp_only_layers else "decoder_sparse_step"
        value = list(architecture.mlp_only_layers) or architecture.decoder_sparse_step
        yield architecture_fault(at_fault, value, rule, "or train a qwen3, which has none")


def _balance_faults(architecture: Qwen3MoeArchitecture) -> Iterator[Fault]:
    for field in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        value = getattr(architecture, field)
        if not 0 <= value < math.inf:
            yield architecture_fault(field, value, "must be at least 0 and finite", "use 0 to switch it off")


UNSUPPORTED: dict[Technique, str] = {}
FSDPTURBO = FSDPTurboModel(expert_modules=("layers.*.mlp.experts",))

# Sizes of 30b_a3b and 235b_a22b: config.json of Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B.
PRESETS = {
    "debug": Qwen3MoeArchitecture(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
    ),
    "30b_a3b": Qwen3MoeArchitecture(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "235b_a22b": Qwen3MoeArchitecture(
        hidden_size=4096,
        intermediate_size=12_288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        num_experts=128,
        num_experts_per_tok=8,
    ),
}
