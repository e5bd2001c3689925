"""The shape of a dense Qwen3, in Hugging Face's words, with the published sizes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrain.config.section import Section
from torchtrain.distributed.legality import Technique
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import (
    count_attention_parameters,
    count_feed_forward_parameters,
    find_attention_faults,
    find_sign_faults,
)


@dataclass(frozen=True, kw_only=True)
class Qwen3Architecture(Section):
    """Every number that the parameters and the forward of a dense Qwen3 depend on."""

    vocab_size: int = 151_936
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    max_position_embeddings: int = 40_960
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: every linear layer, the head included; see ``nn.flops``."""
        attention = count_attention_parameters(self)
        feed_forward = count_feed_forward_parameters(self.hidden_size, self.intermediate_size)
        return self.num_hidden_layers * (attention + feed_forward) + self.vocab_size * self.hidden_size


def find_architecture_faults(architecture: Qwen3Architecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return [*find_sign_faults(architecture), *find_attention_faults(architecture)]


UNSUPPORTED: dict[Technique, str] = {"expert parallel": "it has no experts"}

# Sizes of 0.6b to 32b: config.json of Qwen/Qwen3-0.6B, -1.7B, -4B, -8B, -14B and -32B.
PRESETS = {
    "debug": Qwen3Architecture(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
    ),
    "0.6b": Qwen3Architecture(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "1.7b": Qwen3Architecture(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "4b": Qwen3Architecture(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "8b": Qwen3Architecture(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "14b": Qwen3Architecture(
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "32b": Qwen3Architecture(
        hidden_size=5120,
        intermediate_size=25_600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}
