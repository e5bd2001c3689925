"""Hold Llama against Hugging Face and the reference; options and exit codes stand in ``compare``."""

from __future__ import annotations

import sys

from compare import main

from models.llama.architecture import LlamaArchitecture

SMALL = LlamaArchitecture(
    vocab_size=101,
    hidden_size=40,
    intermediate_size=52,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)

if __name__ == "__main__":
    sys.exit(main("llama", SMALL))
