"""The Qwen3 families: published sizes, what is refused, what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from models.qwen3.architecture import PRESETS as DENSE_PRESETS
from models.qwen3.model import build_qwen3
from models.qwen3_moe.architecture import PRESETS as MOE_PRESETS
from models.qwen3_moe.model import build_qwen3_moe, flops_per_token, init_rule
from models.registry import resolve_architecture
from torchtrain.errors import ConfigError
from torchtrain.nn.init import Constant, Normal, draw_rows
from torchtrain.nn.moe import MoE, RoutedExperts


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        # The counts that Hugging Face shows for the published checkpoints; tied heads counted once.
        ("0.6b", 596_049_920),
        ("1.7b", 1_720_574_976),
        ("4b", 4_022_468_096),
        ("8b", 8_190_735_360),
        ("14b", 14_768_307_200),
        ("32b", 32_762_123_264),
    ],
)
def test_dense_presets_have_the_published_parameter_counts(preset, num_parameters):
    with torch.device("meta"):
        model = build_qwen3(DENSE_PRESETS[preset])
    assert count(model) == num_parameters
    linear_layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    expected = sum(layer.weight.numel() for layer in linear_layers)
    assert DENSE_PRESETS[preset].num_matmul_parameters == expected


@pytest.mark.parametrize(
    ("preset", "num_parameters", "num_visited"),
    [("30b_a3b", 30_532_122_624, 3.3e9), ("235b_a22b", 235_093_634_560, 22.2e9)],
)
def test_presets_with_experts_have_the_published_parameter_counts(preset, num_parameters, num_visited):
    architecture = MOE_PRESETS[preset]
    with torch.device("meta"):
        assert count(build_qwen3_moe(architecture)) == num_parameters
    embedding = architecture.vocab_size * architecture.hidden_size
    assert architecture.num_matmul_parameters + embedding == pytest.approx(num_visited, rel=0.02)


def test_flops_count_the_experts_that_a_token_visits():
    base = replace(MOE_PRESETS["debug"], mlp_only_layers=(0,), shared_expert_intermediate_size=64)
    with torch.device("meta"):
        model = build_qwen3_moe(base)
    whole = sum(p.numel() for p in model.parameters() if p.dim() > 1) - base.vocab_size * base.hidden_size
    stacks = sum(count(module) for module in model.modules() if isinstance(module, RoutedExperts))
    assert base.num_matmul_parameters == whole - stacks + stacks * base.num_experts_per_tok // base.num_experts
    more = replace(base, num_experts=2 * base.num_experts)
    routers = 3 * base.num_experts * base.hidden_size
    assert flops_per_token(more, 64) - flops_per_token(base, 64) == 6 * routers


def test_layers_are_dense_where_the_sizes_say_so():
    architecture = replace(
        MOE_PRESETS["debug"], num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=(3,), vocab_size=16
    )
    with torch.device("meta"):
        blocks = build_qwen3_moe(architecture).blocks()
    assert [isinstance(block.mlp, MoE) for block in blocks] == [False, True, False, False, False, True]
    assert architecture.num_sparse_layers == 2


def faults_of(name="qwen3_moe", **overrides):
    with pytest.raises(ConfigError) as caught:
        resolve_architecture(name, "debug", overrides)
    return {fault.path.removeprefix("model.overrides."): fault for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts", 0),
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", 0),
        ("shared_expert_intermediate_size", -1),
        ("decoder_sparse_step", 0),
        ("decoder_sparse_step", 5),
        ("mlp_only_layers", [4]),
        ("mlp_only_layers", [0, 1, 2, 3]),
        ("router_aux_loss_coef", -0.1),
        ("router_z_loss_coef", float("inf")),
        ("router_bias_update_rate", -1.0),
        ("router_aux_loss_scope", "rank"),
        ("head_dim", 31),
    ],
)
def test_a_senseless_size_is_refused_by_its_path(field, value):
    faults = faults_of(**{field: value})
    assert faults.keys() == {field}
    assert faults[field].fix


def test_the_head_size_is_free_of_the_hidden_size():
    assert resolve_architecture("qwen3", "debug", {"hidden_size": 100, "head_dim": 18}).num_attention_heads == 8


def test_experts_are_drawn_like_the_layers_they_stand_for():
    architecture = MOE_PRESETS["debug"]
    assert init_rule(architecture, "layers.0.mlp.experts.gate_proj") == Normal(0.02)
    assert init_rule(architecture, "layers.0.mlp.router.weight") == Normal(0.02)
    small = init_rule(architecture, "layers.0.mlp.experts.down_proj")
    assert small == init_rule(architecture, "layers.0.mlp.shared_expert.down_proj.weight")
    assert small == Normal(0.02 / 8**0.5)
    assert init_rule(architecture, "layers.0.self_attn.q_norm.weight") == Constant(1.0)


@pytest.mark.parametrize("shape", [(6, 5, 3), (6, 200, 400)])
def test_experts_have_the_same_values_however_many_ranks_share_them(shape):
    def draw(start, stop):
        return draw_rows(Normal(1.0), seed=3, fqn="experts.up_proj", shape=shape, start=start, stop=stop)

    whole = draw(0, 6)
    for num_ranks in (2, 3, 6):
        share = 6 // num_ranks
        parts = [draw(rank * share, (rank + 1) * share) for rank in range(num_ranks)]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole[0], whole[1])
