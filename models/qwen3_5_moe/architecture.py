"""The shape of the text side of a Qwen3.5 with experts, in Hugging Face's words. Imports no torch."""

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

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeArchitecture(Section):
    """Every number that the parameters, the forward and the balance of this family depend on.

    What balances the load stands here for the reasons given in ``qwen3_moe``'s file.
    """

    vocab_size: int = 248_320
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...] | None = None
    """Of every layer; null: each ``full_attention_interval``-th attends, the others are delta nets."""
    full_attention_interval: int = 4
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, ...] = (11, 11, 10)
    """Frequencies that turn by each of a token's positions, where it has several; text has one."""
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    router_aux_loss_scope: Literal["sequence", "batch"] = "sequence"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000_000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def attends(self, layer: int) -> bool:
        """Say whether a layer, counted from 0, has full attention; the others are gated delta nets."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "full_attention"
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def intermediate_size(self) -> int:
        """Size of what every token visits beside the routed experts."""
        return self.shared_expert_intermediate_size

    @property
    def num_full_attention_layers(self) -> int:
        """Layers with full attention."""
        return sum(self.attends(layer) for layer in range(self.num_hidden_layers))

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with, of the experts those that it visits; see ``nn.flops``."""
        router_and_gate = self.hidden_size * (self.num_experts + 1)
        visited = self.num_experts_per_tok * count_feed_forward_parameters(self.hidden_size, self.moe_intermediate_size)
        shared = count_feed_forward_parameters(self.hidden_size, self.shared_expert_intermediate_size)
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        attention = count_attention_parameters(self) + gate
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        key_size, value_size = keys * self.linear_key_head_dim, values * self.linear_value_head_dim
        delta_net = self.hidden_size * (2 * key_size + 3 * value_size + 2 * values)
        num_attention = self.num_full_attention_layers
        mixers = num_attention * attention + (self.num_hidden_layers - num_attention) * delta_net
        return (
            mixers + self.num_hidden_layers * (router_and_gate + visited + shared) + self.vocab_size * self.hidden_size
        )


_COUNTS = (
    *(name for name in DECODER_COUNTS if name != "intermediate_size"),
    "full_attention_interval",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts",
    "num_experts_per_tok",
)


def find_architecture_faults(architecture: Qwen3_5MoeArchitecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return [
        *find_sign_faults(architecture, counts=_COUNTS),
        *find_attention_faults(architecture),
        *_rotary_faults(architecture),
        *_delta_net_faults(architecture),
        *_layer_faults(architecture),
        *_expert_faults(architecture),
    ]


def _rotary_faults(architecture: Qwen3_5MoeArchitecture) -> Iterator[Fault]:
    factor, head_dim = architecture.partial_rotary_factor, architecture.head_dim
    if not 0 < factor <= 1 or int(head_dim * factor) < 2 or int(head_dim * factor) % 2:
        rule = f"must make an even number of at least 2 values of head_dim = {head_dim} turn"
        yield architecture_fault("partial_rotary_factor", factor, rule, "use 1.0, 0.5 or 0.25")
    elif sum(architecture.mrope_section) != int(head_dim * factor) // 2:
        rule = (
            f"must add up to the {int(head_dim * factor) // 2} frequencies that head_dim x partial_rotary_factor make"
        )
        yield architecture_fault("mrope_section", list(architecture.mrope_section), rule, "as in [11, 11, 10] for 32")


def _delta_net_faults(architecture: Qwen3_5MoeArchitecture) -> Iterator[Fault]:
    keys, values = architecture.linear_num_key_heads, architecture.linear_num_value_heads
    if keys >= 1 and values >= 1 and values % keys:
        rule = f"must be a multiple of linear_num_key_heads = {keys}"
        fix = f"use {max(1, values // keys) * keys}"
        yield architecture_fault("linear_num_value_heads", values, rule, fix)


def _layer_faults(architecture: Qwen3_5MoeArchitecture) -> Iterator[Fault]:
    types, layers = architecture.layer_types, architecture.num_hidden_layers
    if types is not None and len(types) != layers and layers >= 1:
        rule = f"must name the type of each of num_hidden_layers = {layers} layers, not of {len(types)}"
        yield architecture_fault("layer_types", list(types), rule, "use null and set full_attention_interval")


def _expert_faults(architecture: Qwen3_5MoeArchitecture) -> Iterator[Fault]:
    choices, experts = architecture.num_experts_per_tok, architecture.num_experts
    if choices > experts >= 1:
        rule = f"must not exceed num_experts = {experts}"
        yield architecture_fault("num_experts_per_tok", choices, rule, f"use {experts} or fewer")
    for field in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        value = getattr(architecture, field)
        if not 0 <= value < math.inf:
            yield architecture_fault(field, value, "must be at least 0 and finite", "use 0 to switch it off")


_NO_TP = "its gated delta nets are not split over tensor-parallel ranks"
_ONLY_ULYSSES = "a gated delta net passes its state along the whole sequence; accelerator.cp_mode: ulysses can"
UNSUPPORTED: dict[Technique, str] = {
    "tensor parallel": _NO_TP,
    "sequence parallel": _NO_TP,
    "loss parallel": _NO_TP,
    "context parallel, allgather": _ONLY_ULYSSES,
    "context parallel, ring": _ONLY_ULYSSES,
}
FSDPTURBO = FSDPTurboModel(expert_modules=("layers.*.mlp.experts",))

PRESETS = {
    "debug": Qwen3_5MoeArchitecture(
        vocab_size=4096,
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mrope_section=(3, 3, 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        moe_intermediate_size=96,
        shared_expert_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.01,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
    ),
    # Qwen/Qwen3.5-35B-A3B: the defaults of Hugging Face's Qwen3_5MoeTextConfig, which are that checkpoint's sizes. Its
    # context and rotary base, for which that class has older defaults: the model card (262,144) and slime's launch
    # script for this model, scripts/models/qwen3.5-35B-A3B.sh (10,000,000).
    "35b_a3b": Qwen3_5MoeArchitecture(
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
    ),
}
