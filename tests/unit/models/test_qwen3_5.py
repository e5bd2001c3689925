"""The Qwen3.5 families: published sizes, what is refused, what is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.qwen3_5.architecture import PRESETS as DENSE_PRESETS
from models.qwen3_5_moe.architecture import PRESETS as MOE_PRESETS
from models.registry import load_spec, resolve_architecture
from torchtrain.errors import ConfigError
from torchtrain.nn.init import Constant, Normal
from torchtrain.nn.moe import RoutedExperts
from torchtrain.testing.oracles import build_hugging_face

PRESETS = {"qwen3_5": DENSE_PRESETS, "qwen3_5_moe": MOE_PRESETS}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(family, preset):
    with torch.device("meta"):
        return load_spec(family).build(PRESETS[family][preset])


@pytest.mark.parametrize(("family", "preset"), [(family, preset) for family in PRESETS for preset in PRESETS[family]])
def test_presets_have_the_parameters_of_hugging_faces_class(family, preset):
    pytest.importorskip("transformers")
    with torch.device("meta"):
        theirs = build_hugging_face(load_spec(family).hugging_face.config, PRESETS[family][preset])
    assert count(on_meta(family, preset)) == count(theirs)


@pytest.mark.parametrize(
    ("family", "preset", "billions"),
    [
        ("qwen3_5", "0.8b", 0.8),
        ("qwen3_5", "2b", 2),
        ("qwen3_5", "4b", 4),
        ("qwen3_5", "9b", 9),
        ("qwen3_5", "27b", 27),
        ("qwen3_5_moe", "35b_a3b", 35),
    ],
)
def test_presets_are_as_large_as_their_names_say(family, preset, billions):
    """Names count the vision encoder too, a tenth of the smallest."""
    assert count(on_meta(family, preset)) == pytest.approx(billions * 1e9, rel=0.1)


@pytest.mark.parametrize("family", PRESETS)
def test_flops_count_the_weights_that_a_token_is_multiplied_with(family):
    architecture, model = PRESETS[family]["debug"], on_meta(family, "debug")
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    expected = sum(weight.numel() for weight in matrices)
    if family == "qwen3_5_moe":
        share = architecture.num_experts_per_tok / architecture.num_experts
        expected += share * sum(count(module) for module in model.modules() if isinstance(module, RoutedExperts))
        expected += architecture.num_hidden_layers * architecture.num_experts * architecture.hidden_size
    assert architecture.num_matmul_parameters == expected
    flops = load_spec(family).flops_per_token
    # Longer sequences cost attention, a quarter of the layers here, and nothing of the delta rule.
    heads = architecture.num_attention_heads * architecture.head_dim
    assert flops(architecture, 96) - flops(architecture, 64) == pytest.approx(6 * 32 * heads)


@pytest.mark.parametrize("family", PRESETS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_num_value_heads", 5),
        ("linear_conv_kernel_dim", 0),
        ("full_attention_interval", 0),
        ("layer_types", ["full_attention"]),
        ("partial_rotary_factor", 0.01),
        ("mrope_section", [3, 3, 3]),
        ("head_dim", 0),
    ],
)
def test_a_senseless_size_is_refused_by_its_path(family, field, value):
    with pytest.raises(ConfigError) as caught:
        resolve_architecture(family, "debug", {field: value})
    assert f"model.overrides.{field}" in {fault.path for fault in caught.value.faults}


def test_a_dense_one_needs_a_feed_forward_layer_of_some_size():
    with pytest.raises(ConfigError, match="intermediate_size"):
        resolve_architecture("qwen3_5", "debug", {"intermediate_size": 0})


@pytest.mark.parametrize("family", PRESETS)
def test_norms_around_zero_start_at_zero_and_the_delta_nets_own_at_one(family):
    architecture, rule = PRESETS[family]["debug"], load_spec(family).init_rule
    assert rule(architecture, "norm.weight") == rule(architecture, "layers.0.input_layernorm.weight") == Constant(0.0)
    assert rule(architecture, "layers.0.linear_attn.norm.weight") == Constant(1.0)
    assert rule(architecture, "layers.0.linear_attn.out_proj.weight") == Normal(0.02 / 8**0.5)
