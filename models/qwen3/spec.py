"""The record through which the trainer knows the dense Qwen3 family."""

from __future__ import annotations

from models.qwen3.architecture import PRESETS
from models.qwen3.hugging_face import HUGGING_FACE
from models.qwen3.model import build_qwen3, flops_per_token, init_rule
from models.qwen3.parallelize import parallelize_qwen3
from torchtrain.model_spec import ModelSpec

SPEC = ModelSpec(
    name="qwen3",
    build=build_qwen3,
    parallelize=parallelize_qwen3,
    init_rule=init_rule,
    flops_per_token=flops_per_token,
    hugging_face=HUGGING_FACE,
    presets=PRESETS,
)
