"""The record through which the trainer knows the text side of a dense Qwen3.5."""

from __future__ import annotations

from models.qwen3_5.architecture import PRESETS
from models.qwen3_5.hugging_face import HUGGING_FACE
from models.qwen3_5.model import build_qwen3_5, flops_per_token, init_rule
from models.qwen3_5.parallelize import parallelize_qwen3_5
from torchtrain.model_spec import ModelSpec

SPEC = ModelSpec(
    name="qwen3_5",
    build=build_qwen3_5,
    parallelize=parallelize_qwen3_5,
    init_rule=init_rule,
    flops_per_token=flops_per_token,
    hugging_face=HUGGING_FACE,
    presets=PRESETS,
)
