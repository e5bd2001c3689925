"""The shape of the text side of a dense Qwen3.5, in Hugging Face's words. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrain.distributed.legality import DELTA_NET_UNSUPPORTED, Technique
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import count_feed_forward_parameters
from torchtrain.nn.hybrid_sizes import HybridSizes, find_hybrid_faults


@dataclass(frozen=True, kw_only=True)
class Qwen3_5Architecture(HybridSizes):
    """Every number that the parameters and the forward of this family depend on."""

    intermediate_size: int

    @property
    def num_matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: every linear layer, the head included; see ``nn.flops``."""
        feed_forward = count_feed_forward_parameters(self.hidden_size, self.intermediate_size)
        return self.num_mixer_parameters + self.num_hidden_layers * feed_forward + self.vocab_size * self.hidden_size


def find_architecture_faults(architecture: Qwen3_5Architecture) -> list[Fault]:
    """List what makes these sizes impossible; paths are those of the job file."""
    return list(find_hybrid_faults(architecture, more_counts=("intermediate_size",)))


UNSUPPORTED: dict[Technique, str] = {**DELTA_NET_UNSUPPORTED, "expert parallel": "it has no experts"}

PRESETS = {
    "debug": Qwen3_5Architecture(
        vocab_size=4096,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mrope_section=(3, 3, 2),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=4096,
        rope_theta=10_000.0,
    ),
    # Qwen/Qwen3.5-0.8B, -2B, -4B, -9B and -27B. 9b: the defaults of Hugging Face's Qwen3_5TextConfig, which are that
    # checkpoint's sizes. The others: omegalax's table of these checkpoints (omegalax/models/qwen3_5), which agrees with
    # the model card of 4B and with slime's launch scripts scripts/models/qwen3.5-0.8B.sh and -27B.sh.
    "0.8b": Qwen3_5Architecture(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "2b": Qwen3_5Architecture(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "4b": Qwen3_5Architecture(
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=True,
    ),
    "9b": Qwen3_5Architecture(
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
    ),
    "27b": Qwen3_5Architecture(
        hidden_size=5120,
        intermediate_size=17_408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
    ),
}
