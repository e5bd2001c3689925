"""Which parameters travel together, decided on a meta model."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Shard

from models.registry import load_spec, resolve_architecture
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.prefetch import plan_prefetch
from torchtrain.distributed.fsdp2.shard_plan import ROOT, ShardPlan
from torchtrain.distributed.fsdp2.source_layout import SourceLayout
from torchtrain.distributed.fsdp2.units import plan_shards
from torchtrain.distributed.topology import Topology
from torchtrain.errors import ConfigError


def meta_llama(num_layers: int = 2, *, tied: bool = False) -> nn.Module:
    overrides = {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
    with torch.device("meta"):
        return load_spec("llama").build(resolve_architecture("llama", "debug", overrides))


def plan(
    model: nn.Module,
    config: FSDP2Config | None = None,
    source_layouts: dict[str, SourceLayout] | None = None,
    **sizes: int,
) -> ShardPlan:
    hsdp = {"world_size": 8, "dp_size": 8, "dp_replicate_size": 2, "dp_shard_size": 4}
    topology = Topology(**{field.name: 1 for field in fields(Topology) if field.name.endswith("_size")} | hsdp | sizes)
    return plan_shards(model, config or FSDP2Config(), topology, source_layouts or {})


def owners(model: nn.Module, config: FSDP2Config | None = None) -> dict[str, str]:
    return {parameter.fqn: unit.fqn for unit in plan(model, config).units for parameter in unit.parameters}


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_exactly_one_unit(num_layers: int, tied: bool) -> None:
    model = meta_llama(num_layers, tied=tied)
    units = plan(model).units
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
    assert {unit.fqn for unit in plan(model).units} == {ROOT, "trunk.0", "trunk.1"}


def test_a_weight_shared_between_blocks_belongs_to_the_root() -> None:
    model = meta_llama()
    first, second = model.blocks()
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    assert owners(model)["layers.0.mlp.up_proj.weight"] == ROOT


@pytest.mark.parametrize("reshard", [False, True])
def test_root_never_reshards_after_forward(reshard: bool) -> None:
    units = plan(meta_llama(), FSDP2Config(reshard_after_forward=reshard)).units
    assert [unit.reshard_after_forward for unit in units] == [False, reshard, reshard]


def test_prefetch_targets_are_the_next_units_in_module_order() -> None:
    units = plan(meta_llama(4), FSDP2Config(forward_prefetch_depth=2, backward_prefetch_depth=1)).units
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
    assert plan(meta_llama(3)).describe() == (
        "FSDP wraps 3 transformer blocks and the root on mesh (fsdp_replicate 2 x fsdp_shard 4)"
    )


def test_replicated_parameters_stay_in_their_unit() -> None:
    config = FSDP2Config(replicate_params=("layers.0.mlp.up_proj.weight", "*norm.weight"))
    planned = {parameter.fqn: parameter for unit in plan(meta_llama(), config).units for parameter in unit.parameters}
    assert {fqn for fqn, parameter in planned.items() if parameter.is_replicated} == {
        "layers.0.mlp.up_proj.weight",
        "norm.weight",
        *(f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")),
    }
    assert owners(meta_llama(), config) == owners(meta_llama())


def test_a_tied_parameter_may_be_replicated_by_any_of_its_names() -> None:
    config = FSDP2Config(replicate_params=("lm_head.weight",))
    (root, *_) = plan(meta_llama(tied=True), config).units
    assert {parameter.fqn: parameter.is_replicated for parameter in root.parameters} == {
        "embed_tokens.weight": True,
        "norm.weight": False,
    }


def test_unknown_and_idle_replicate_entries_are_refused_together_with_the_nearest_names() -> None:
    config = FSDP2Config(replicate_params=("layers.0.mlp.up_pro.weight", "*nrm*"))
    with pytest.raises(ConfigError) as error:
        plan(meta_llama(), config)
    assert len(error.value.faults) == 2
    assert "layers.0.mlp.up_proj.weight" in str(error.value)
    assert "fsdp_config.replicate_params" in str(error.value)


def test_a_scalar_cannot_be_replicated() -> None:
    model = meta_llama()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="scalar scale"):
        plan(model, FSDP2Config(replicate_params=("scale",)))


def test_source_layouts_are_resolved_on_any_alias() -> None:
    layouts = {"lm_head.weight": SourceLayout("tp", Shard(0))}
    (root, *_) = plan(meta_llama(tied=True), source_layouts=layouts).units
    assert root.parameters[0].source == SourceLayout("tp", Shard(0))


def test_wrong_source_layouts_are_refused_together_by_name() -> None:
    layouts = {
        "layers.0.mlp.gate.weight": SourceLayout("tp", Shard(0)),
        "norm.weight": SourceLayout("tp", Partial()),
        "lm_head.weight": SourceLayout("tp", Shard(0)),
        "embed_tokens.weight": SourceLayout("tp", Shard(1)),
    }
    with pytest.raises(ConfigError) as error:
        plan(meta_llama(tied=True), source_layouts=layouts)
    unknown, partial, conflict = map(str, error.value.faults)
    assert "layers.0.mlp.gate_proj.weight" in unknown
    assert "norm.weight" in partial
    assert "pending sum" in partial
    assert "lm_head.weight" in conflict
    assert "embed_tokens.weight" in conflict


class Experts(nn.Module):
    def __init__(self, num_experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_experts, width, 8, device="meta"))
        self.down = nn.Parameter(torch.empty(num_experts, 8, width, device="meta"))


def meta_moe(num_experts: int = 8) -> tuple[nn.Module, dict[str, SourceLayout]]:
    model = meta_llama()
    layouts = {}
    for name, block in model.layers.items():
        block.mlp.experts = Experts(num_experts, 6)
        layouts |= {f"layers.{name}.mlp.experts.{p}": SourceLayout("ep", Shard(0)) for p in ("up", "down")}
    return model, layouts


EP = {"ep_size": 2, "edp_size": 4, "edp_replicate_size": 2, "edp_shard_size": 2}


def test_modules_with_an_ep_layout_are_units_of_their_own_on_the_expert_mesh() -> None:
    model, layouts = meta_moe()
    planned = plan(model, source_layouts=layouts, **EP)
    expert_units = [unit for unit in planned.units if unit.mesh == "expert"]
    assert [unit.fqn for unit in expert_units] == ["layers.0.mlp.experts", "layers.1.mlp.experts"]
    assert all(parameter.source is not None for unit in expert_units for parameter in unit.parameters)
    assert planned.meshes["expert"] == (("edp_replicate", 2), ("edp_shard", 2))
    assert all("experts" not in p.fqn for unit in planned.units if unit.mesh == "dense" for p in unit.parameters)


@pytest.mark.parametrize(("num_experts", "shard_dim"), [(8, 0), (6, 1)])
def test_experts_that_do_not_split_evenly_are_split_inside(num_experts: int, shard_dim: int) -> None:
    model, layouts = meta_moe(num_experts)
    planned = plan(model, source_layouts=layouts, **EP)
    dims = {p.shard_dim for unit in planned.units if unit.mesh == "expert" for p in unit.parameters}
    assert dims == {shard_dim}


def test_an_expert_module_with_a_parameter_off_ep_is_refused_by_name() -> None:
    model, layouts = meta_moe()
    del layouts["layers.1.mlp.experts.down"]
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.experts\.down"):
        plan(model, source_layouts=layouts, **EP)
