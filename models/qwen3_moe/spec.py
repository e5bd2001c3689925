"""The record through which the trainer knows the Qwen3 family with experts."""

from __future__ import annotations

from models.qwen3_moe.architecture import PRESETS
from models.qwen3_moe.hugging_face import HUGGING_FACE
from models.qwen3_moe.model import build_qwen3_moe, flops_per_token, init_rule
from models.qwen3_moe.parallelize import parallelize_qwen3_moe
from torchtrain.model_spec import ModelSpec

SPEC = ModelSpec(
    name="qwen3_moe",
    build=build_qwen3_moe,
    parallelize=parallelize_qwen3_moe,
    init_rule=init_rule,
    flops_per_token=flops_per_token,
    hugging_face=HUGGING_FACE,
    presets=PRESETS,
)
