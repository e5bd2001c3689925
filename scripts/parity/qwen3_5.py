"""Hold a dense Qwen3.5 against Hugging Face and the reference; options and exit codes stand in ``compare``."""

from __future__ import annotations

import sys

from compare import main

from models.qwen3_5.architecture import Qwen3_5Architecture

SMALL = Qwen3_5Architecture(
    vocab_size=101,
    hidden_size=40,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=10_000.0,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    # Less would blow up the rounding of a head that says next to nothing.
    rms_norm_eps=1e-3,
)

if __name__ == "__main__":
    sys.exit(main("qwen3_5", SMALL))
