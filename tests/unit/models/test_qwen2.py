"""The Qwen2 family: published sizes, and what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.qwen2.architecture import PRESETS
from models.qwen2.model import build_qwen2, init_rule
from models.registry import resolve_architecture
from torchtrain.errors import ConfigError
from torchtrain.nn.init import Constant


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    # The counts that Hugging Face shows for the published checkpoints; tied heads counted once.
    [("0.5b", 494_032_768), ("1.5b", 1_543_714_304), ("7b", 7_615_616_512)],
)
def test_presets_have_the_published_parameter_counts(preset, num_parameters):
    with torch.device("meta"):
        model = build_qwen2(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    linear_layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert PRESETS[preset].num_matmul_parameters == sum(layer.weight.numel() for layer in linear_layers)


def test_biases_start_at_zero():
    assert init_rule(PRESETS["debug"], "layers.0.self_attn.q_proj.bias") == Constant(0.0)


def test_key_heads_that_do_not_divide_the_heads_are_refused():
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        resolve_architecture("qwen2", "debug", {"num_key_value_heads": 3})
