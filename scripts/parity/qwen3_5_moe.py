"""Hold a Qwen3.5 with experts against Hugging Face and the reference; options and exit codes stand in ``compare``."""

from __future__ import annotations

import sys

from compare import main

from models.qwen3_5_moe.architecture import Qwen3_5MoeArchitecture

SMALL = Qwen3_5MoeArchitecture(
    vocab_size=101,
    hidden_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=10_000.0,
    moe_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    shared_expert_intermediate_size=20,
    # Less would blow up the rounding of a head that says next to nothing.
    rms_norm_eps=1e-3,
)

if __name__ == "__main__":
    sys.exit(main("qwen3_5_moe", SMALL))
