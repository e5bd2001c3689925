"""Checkpoints of the text side of a dense Qwen3.5 as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.hybrid_format import (
    HYBRID_DEFAULTS,
    HYBRID_FIXED,
    HYBRID_ROWS,
    OTHER_PARTS,
    in_language_model,
    name_every_layer,
)
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import WeightMap

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen3_5_text",
        class_name="Qwen3_5ForCausalLM",
        multimodal_type="qwen3_5",
        defaults=HYBRID_DEFAULTS,
        fixed=HYBRID_FIXED,
        written={"hidden_act": "silu"},
        resolve=name_every_layer,
        training=("initializer_range", "max_position_embeddings"),
    ),
    weights=WeightMap(rows=(*HYBRID_ROWS, *in_language_model(HYBRID_ROWS)), ignored_prefixes=OTHER_PARTS),
)
