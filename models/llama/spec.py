"""The record through which the trainer knows the Llama family."""

from __future__ import annotations

from models.llama.architecture import PRESETS
from models.llama.hugging_face import HUGGING_FACE
from models.llama.model import build_llama, flops_per_token, init_rule
from models.llama.parallelize import parallelize_llama
from torchtrain.model_spec import ModelSpec

SPEC = ModelSpec(
    name="llama",
    build=build_llama,
    parallelize=parallelize_llama,
    init_rule=init_rule,
    flops_per_token=flops_per_token,
    hugging_face=HUGGING_FACE,
    presets=PRESETS,
)
