"""Llama checkpoints as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import DECODER_ROWS, OLD_BUFFERS
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import WeightMap

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="llama",
        class_name="LlamaForCausalLM",
        # Those of Hugging Face's LlamaConfig.
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        },
        fixed={"hidden_act": ("silu",), "mlp_bias": (False,), "pretraining_tp": (1,)},
        written={"hidden_act": "silu", "mlp_bias": False},
        training=("initializer_range", "max_position_embeddings"),
    ),
    weights=WeightMap(rows=DECODER_ROWS, ignored=OLD_BUFFERS),
)
