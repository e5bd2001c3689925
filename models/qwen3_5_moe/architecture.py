"""The shape of the text side of a Qwen3.5 with experts, in Hugging Face's words. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtrain.distributed.fsdpturbo.legality import FSDPTurboModel
from torchtrain.distributed.legality import DELTA_NET_UNSUPPORTED, Technique
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import architecture_fault, count_feed_forward_parameters
from torchtrain.nn.hybrid_sizes import HybridSizes, find_hybrid_faults


@dataclass(frozen=True, kw_only=True)
class Qwen3_5MoeArchitecture(HybridSizes):
    """Every number that the parameters, the forward and the balance of this family depend on.

    What balances the load stands here for the reasons given in ``qwen3_moe``'s file.
    """

    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    router_aux_loss_coef: float = 0.001
    router_aux_loss_scope: Literal["sequence", "batch"] = "sequence"
    router_z_loss_coef: float = 0.0
    router_bias_update_rate: float = 0.0

    @property
    def intermediate_size(self) -> int:
        """Size of what every token visits beside the routed experts."""
        return self.shared_expert_intermediate_size

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with, of the experts those that it visits; see ``nn.flops``."""
        router_and_gate = self.hidden_size * (self.num_experts + 1)
        visited = self.num_experts_per_tok * count_feed_forward_parameters(self.hidden_size, self.moe_intermediate_size)
        shared = count_feed_forward_parameters(self.hidden_size, self.shared_expert_intermediate_size)
        feed_forward = self.num_hidden_layers * (router_and_gate + visited + shared)
        return self.num_mixer_parameters + feed_forward + self.vocab_size * self.hidden_size


_COUNTS = ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts", "num_experts_per_tok")


def find_architecture_faults(architecture: Qwen3_5MoeArchitecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return [*find_hybrid_faults(architecture, more_counts=_COUNTS), *_expert_faults(architecture)]


def _expert_faults(architecture: Qwen3_5MoeArchitecture) -> Iterator[Fault]:
    choices, experts = architecture.num_experts_per_tok, architecture.num_experts
    if choices > experts >= 1:
        rule = f"must not exceed num_experts = {experts}"
        yield architecture_fault("num_experts_per_tok", choices, rule, f"use {experts} or fewer")
    for field in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
        value = getattr(architecture, field)
        if not 0 <= value < math.inf:
            yield architecture_fault(field, value, "must be at least 0 and finite", "use 0 to switch it off")


UNSUPPORTED: dict[Technique, str] = {**DELTA_NET_UNSUPPORTED}
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
