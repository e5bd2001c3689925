"""Checkpoints of a Qwen2 as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import DECODER_ROWS
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import WeightMap

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        # Those of Hugging Face's Qwen2Config.
        defaults={
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        written={"hidden_act": "silu", "use_sliding_window": False},
        training=("initializer_range", "max_position_embeddings"),
    ),
    weights=WeightMap(rows=DECODER_ROWS),
)
