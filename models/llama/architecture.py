"""The shape of a Llama, in Hugging Face's words, with the published sizes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section
from torchtrain.distributed.legality import Technique
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import (
    architecture_fault,
    count_attention_parameters,
    count_feed_forward_parameters,
    find_attention_faults,
    find_sign_faults,
)


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Section):
    """Llama 3's stretching of rotary frequencies to a longer context; see ``nn.rope.Llama3Scaling``."""

    rope_type: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True)
class LlamaArchitecture(Section):
    """Every number that the parameters and the forward of a Llama depend on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: every linear layer, the head included; see ``nn.flops``."""
        attention = count_attention_parameters(self)
        feed_forward = count_feed_forward_parameters(self.hidden_size, self.intermediate_size)
        return self.num_hidden_layers * (attention + feed_forward) + self.vocab_size * self.hidden_size


def find_architecture_faults(architecture: LlamaArchitecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return [
        *find_sign_faults(architecture),
        *find_attention_faults(architecture),
        *_hidden_size_faults(architecture),
        *_rope_faults(architecture),
    ]


def _hidden_size_faults(architecture: LlamaArchitecture) -> Iterator[Fault]:
    heads = architecture.num_attention_heads
    if heads >= 1 and architecture.hidden_size % heads:
        nearest = max(1, round(architecture.hidden_size / heads)) * heads
        rule = f"must be a multiple of num_attention_heads = {heads}"
        yield architecture_fault("hidden_size", architecture.hidden_size, rule, f"use {nearest}")


def _rope_faults(architecture: LlamaArchitecture) -> Iterator[Fault]:
    scaling = architecture.rope_scaling
    if scaling is None:
        return
    if not (scaling.factor >= 1 and math.isfinite(scaling.factor)):
        yield architecture_fault(
            "rope_scaling.factor", scaling.factor, "must be at least 1 and finite", "use 1 for no stretching"
        )
    if not 0 < scaling.low_freq_factor < scaling.high_freq_factor < math.inf:
        rule = f"must be above 0 and below high_freq_factor = {scaling.high_freq_factor}"
        yield architecture_fault(
            "rope_scaling.low_freq_factor", scaling.low_freq_factor, rule, "use 1.0 and 4.0 as Llama 3.1"
        )
    if scaling.original_max_position_embeddings < 1:
        value = scaling.original_max_position_embeddings
        yield architecture_fault(
            "rope_scaling.original_max_position_embeddings", value, "must be at least 1", "use 8192"
        )


UNSUPPORTED: dict[Technique, str] = {"expert parallel": "it has no experts"}

# Sizes of smollm2_135m: config.json of HuggingFaceTB/SmolLM2-135M.
# Sizes of 1b to 405b: config.json of meta-llama/Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B, -70B and -405B.
PRESETS = {
    "debug": LlamaArchitecture(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
    ),
    "smollm2_135m": LlamaArchitecture(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        initializer_range=0.041_666_666_666_666_664,
    ),
    "1b": LlamaArchitecture(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_word_embeddings=True,
    ),
    "3b": LlamaArchitecture(
        vocab_size=128_256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_scaling=RopeScaling(factor=32.0),
        tie_word_embeddings=True,
    ),
    "8b": LlamaArchitecture(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "70b": LlamaArchitecture(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
    "405b": LlamaArchitecture(
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_scaling=RopeScaling(factor=8.0),
    ),
}
