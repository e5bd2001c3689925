"""The record through which the trainer knows the Qwen2 family."""

from __future__ import annotations

from models.qwen2.architecture import PRESETS
from models.qwen2.hugging_face import HUGGING_FACE
from models.qwen2.model import build_qwen2, flops_per_token, init_rule
from models.qwen2.parallelize import parallelize_qwen2
from torchtrain.model_spec import ModelSpec

SPEC = ModelSpec(
    name="qwen2",
    build=build_qwen2,
    parallelize=parallelize_qwen2,
    init_rule=init_rule,
    flops_per_token=flops_per_token,
    hugging_face=HUGGING_FACE,
    presets=PRESETS,
)
