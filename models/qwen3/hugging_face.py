"""Checkpoints of a dense Qwen3 as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import DECODER_ROWS
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import WeightMap

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen3",
        class_name="Qwen3ForCausalLM",
        # Those of Hugging Face's Qwen3Config.
        defaults={
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        written={"hidden_act": "silu", "use_sliding_window": False},
        training=("initializer_range", "max_position_embeddings"),
    ),
    weights=WeightMap(rows=DECODER_ROWS),
)
