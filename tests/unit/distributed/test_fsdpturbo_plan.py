"""What the plugin takes from the family and from the job, and what it refuses by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.registry import fsdpturbo_models, load_spec, resolve_architecture
from torchtrain.config.load import load_job
from torchtrain.config.parallel import DistConfig
from torchtrain.distributed.fsdpturbo.plan import FSDPTurboPlan, plan_fsdpturbo
from torchtrain.errors import ConfigError
from torchtrain.train import check_job

SIZES = {"num_hidden_layers": 2, "num_experts": 4, "mlp_only_layers": [0], "shared_expert_intermediate_size": 8}
REGISTERED = fsdpturbo_models()["qwen3_moe"]


def model_of() -> nn.Module:
    with torch.device("meta"):
        return load_spec("qwen3_moe").build(resolve_architecture("qwen3_moe", "debug", SIZES))


def plan(efsdp_size: int = 2, **keys: object) -> FSDPTurboPlan:
    return plan_fsdpturbo(model_of(), DistConfig(name="fsdpturbo", **keys), REGISTERED, efsdp_size=efsdp_size)


def test_experts_are_found_where_the_family_says_and_native_leaves_them_to_fsdp() -> None:
    planned = plan()
    assert planned.expert_modules == ("layers.1.mlp.experts",)
    assert planned.custom_units == planned.summed_parameters == ()
    assert planned.ignored_parameters == frozenset()


def test_custom_keeps_experts_from_the_outer_fsdp_and_splits_each_weight() -> None:
    planned = plan(fsdp_implementation="custom")
    (unit,) = planned.custom_units
    assert unit.carrier == unit.fqn == "layers.1.mlp.experts"
    assert unit.shard_dims == {"gate_proj": 1, "up_proj": 1, "down_proj": 1}
    assert planned.ignored_parameters == {f"{unit.fqn}.{name}" for name in unit.shard_dims}


@pytest.mark.parametrize(("pattern", "carrier"), [("layers.*", "layers.1"), ("*.mlp", "layers.1.mlp")])
def test_the_outermost_hook_module_that_is_called_carries_the_hooks(pattern: str, carrier: str) -> None:
    (unit,) = plan(fsdp_implementation="custom", hook_modules=(pattern,)).custom_units
    assert unit.carrier == carrier


def test_ignored_modules_are_summed_unless_frozen_and_naming_experts_changes_nothing() -> None:
    patterns = ("norm", "*.experts", "layers.0.mlp.up_proj")
    assert plan(fsdp_ignored_modules=patterns).summed_parameters == ("layers.0.mlp.up_proj.weight", "norm.weight")
    model = model_of()
    model.norm.requires_grad_(False)
    planned = plan_fsdpturbo(model, DistConfig(fsdp_ignored_modules=("norm",)), REGISTERED, efsdp_size=1)
    assert planned.summed_parameters == ()
    assert planned.ignored_parameters == {"norm.weight"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"fsdp_ignored_modules": ("layer.*.mlp",)}, "fsdp_ignored_modules = 'layer.*.mlp': must match a module"),
        ({"hook_modules": ("*.mpl",)}, "hook_modules = '*.mpl': must match a module"),
        ({"hook_modules": ("layers.0.mlp",)}, "must match modules that are called and hold experts"),
        ({"hook_modules": ("layers",)}, "must match modules that are called and hold experts"),
    ],
)
def test_patterns_that_do_nothing_are_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(fsdp_implementation="custom", **keys)
    assert said in str(caught.value)


def test_weights_that_custom_cannot_split_are_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(efsdp_size=7, fsdp_implementation="custom")
    assert "divides by efsdp = 7; use native, which pads" in str(caught.value)


def refusal_of(*words: str, ranks: int = 2) -> str:
    job = ["train_configs/qwen3_moe/debug.yaml", "dist_config={name: fsdpturbo, ep_size: 2}", *words]
    with pytest.raises(ConfigError) as caught:
        check_job(job, ranks)
    return str(caught.value)


def test_a_family_that_is_not_registered_is_refused_by_name() -> None:
    words = ["train_configs/llama/debug.yaml", "dist_config={name: fsdpturbo, ep_size: 2}"]
    with pytest.raises(ConfigError) as caught:
        check_job(words, 2)
    assert "which llama does not; use qwen3_moe or qwen3_5_moe, or set dist_config.name: fsdp2" in str(caught.value)


@pytest.mark.parametrize("name", ["eager", "fused", "domino", "mc2"])
def test_every_dispatcher_and_both_implementations_are_let_through(name: str) -> None:
    words = ["dist_config={name: fsdpturbo, ep_size: 2, ep_dispatcher: " + name + ", fsdp_implementation: custom}"]
    job = check_job(["train_configs/qwen3_moe/debug.yaml", *words], 4).job
    assert load_job("train_configs/qwen3_moe/debug.yaml", words).dist_config == job.dist_config


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["dist_config.fsdp_implementation=custom", "compile.enabled=true"], "compile.enabled"),
        (["dist_config.fsdp_implementation=custom", "fsdp_config.enable_offload=true"], "fsdp_config.enable_offload"),
        (
            ["dist_config.fsdp_implementation=custom", "activation_checkpoint.mode=selective_op"],
            "activation_checkpoint.mode",
        ),
        (
            ["dist_config.fsdp_ignored_modules=[norm]", "fsdp_config.mix_precision.param_dtype=bfloat16"],
            "fsdp_config.mix_precision.param_dtype",
        ),
        (["dist_config.fsdp_ignored_modules=[norm]", "fsdp_config.enable_offload=true"], "fsdp_config.enable_offload"),
    ],
)
def test_what_the_plugin_cannot_do_is_refused_by_name(words: list[str], path: str) -> None:
    assert path in refusal_of(*words)
