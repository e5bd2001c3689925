"""The shape of a Qwen2, in Hugging Face's words, with the published sizes. Imports no torch."""

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
class Qwen2Architecture(Section):
    """Every number that the parameters and the forward of a Qwen2 depend on."""

    vocab_size: int = 151_936
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: every linear layer, the head included; see ``nn.flops``."""
        attention = count_attention_parameters(self)
        feed_forward = count_feed_forward_parameters(self.hidden_size, self.intermediate_size)
        return self.num_hidden_layers * (attention + feed_forward) + self.vocab_size * self.hidden_size


def find_architecture_faults(architecture: Qwen2Architecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return [*find_sign_faults(architecture), *find_attention_faults(architecture)]


UNSUPPORTED: dict[Technique, str] = {"expert parallel": "it has no experts"}

# Sizes of 0.5b to 7b: config.json of Qwen/Qwen2-0.5B, -1.5B and -7B.
PRESETS = {
    "debug": Qwen2Architecture(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
    ),
    "0.5b": Qwen2Architecture(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "1.5b": Qwen2Architecture(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "7b": Qwen2Architecture(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        head_dim=128,
    ),
}
