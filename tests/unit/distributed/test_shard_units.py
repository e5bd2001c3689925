"""Which parameters travel together, decided on a meta model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.registry import load_spec, resolve_architecture
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.prefetch import plan_prefetch
from torchtrain.distributed.fsdp2.shard_plan import ROOT, ShardPlan
from torchtrain.distributed.fsdp2.units import plan_shard_units


def meta_llama(num_layers: int = 2, *, tied: bool = False) -> nn.Module:
    overrides = {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
    with torch.device("meta"):
        return load_spec("llama").build(resolve_architecture("llama", "debug", overrides))


def owners(model: nn.Module, config: FSDP2Config | None = None) -> dict[str, str]:
    units = plan_shard_units(model, config or FSDP2Config())
    return {parameter.fqn: unit.fqn for unit in units for parameter in unit.parameters}


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_exactly_one_unit(num_layers: int, tied: bool) -> None:
    model = meta_llama(num_layers, tied=tied)
    units = plan_shard_units(model, FSDP2Config())
    planned = [parameter.fqn for unit in units for parameter in unit.parameters]
    assert sorted(planned) == sorted(fqn for fqn, _ in model.named_parameters())
    assert [unit.fqn for unit in units] == [ROOT, *(f"layers.{i}" for i in range(num_layers))]


def test_root_owns_embedding_norm_and_head() -> None:
    outside = {fqn for fqn, owner in owners(meta_llama()).items() if owner == ROOT}
    assert outside == {"embed_tokens.weight", "norm.weight", "lm_head.weight"}


@pytest.mark.parametrize("container", [nn.Sequential, nn.ModuleList])
def test_a_block_is_a_unit_whatever_the_container(container: type[nn.Module]) -> None:
    model = nn.Module()
    model.trunk = (
        container(list(meta_llama().blocks())) if container is nn.ModuleList else container(*meta_llama().blocks())
    )
    assert {unit.fqn for unit in plan_shard_units(model, FSDP2Config())} == {ROOT, "trunk.0", "trunk.1"}


def test_a_weight_shared_between_blocks_belongs_to_the_root() -> None:
    model = meta_llama()
    first, second = model.blocks()
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert owners(model)["layers.0.mlp.up_proj.weight"] == ROOT


@pytest.mark.parametrize("reshard", [False, True])
def test_root_never_reshards_after_forward(reshard: bool) -> None:
    units = plan_shard_units(meta_llama(), FSDP2Config(reshard_after_forward=reshard))
    assert [unit.reshard_after_forward for unit in units] == [False, reshard, reshard]


def test_prefetch_targets_are_the_next_units_in_module_order() -> None:
    units = plan_shard_units(meta_llama(4), FSDP2Config(forward_prefetch_depth=2, backward_prefetch_depth=1))
    forward = {unit.fqn: unit.forward_prefetch for unit in units}
    backward = {unit.fqn: unit.backward_prefetch for unit in units}
    assert forward[ROOT] == ("layers.0", "layers.1")
    assert forward["layers.2"] == ("layers.3",)
    assert forward["layers.3"] == ()
    assert backward[ROOT] == ("layers.3",)
    assert backward["layers.3"] == ("layers.2",)
    assert backward["layers.0"] == ()


def test_depth_zero_plans_no_targets() -> None:
    assert plan_prefetch(["a", "b", "c"], 0, first="r") == {"r": (), "a": (), "b": (), "c": ()}


def test_the_log_line_counts_blocks_and_names_the_mesh() -> None:
    plan = ShardPlan(plan_shard_units(meta_llama(3), FSDP2Config()), (("fsdp_replicate", 2), ("fsdp_shard", 4)))
    assert plan.describe() == "FSDP wraps 3 transformer blocks and the root on mesh (fsdp_replicate 2 x fsdp_shard 4)"
