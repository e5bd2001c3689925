"""Stages cut out of a decoder: together they compute what it computes, and nobody names what is another's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.llama.model import build_llama
from models.qwen3_moe.spec import SPEC as QWEN3_MOE
from models.registry import resolve_architecture
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.config.load import read_job
from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.fsdp2.units import plan_shards, plan_stage_shards
from torchtrain.distributed.pipeline_parallel.split import measure_costs, split_into_stages
from torchtrain.distributed.pipeline_parallel.stage_plan import PipelinePlan, StageCosts, plan_pipeline
from torchtrain.distributed.topology import Topology
from torchtrain.nn.decoder import Decoder

SIZES = {
    "vocab_size": 31,
    "hidden_size": 12,
    "intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
}
PP_SIZE = 2


def build_model() -> Decoder:
    torch.manual_seed(0)
    return build_llama(resolve_architecture("llama", "debug", SIZES))


def plan_of(schedule: PpSchedule) -> PipelinePlan:
    return plan_pipeline(schedule, pp_size=PP_SIZE, num_layers=5, costs=StageCosts(head=0.5, embedding=0.5))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_in_turn_compute_what_the_whole_computes(schedule: PpSchedule) -> None:
    ids = torch.arange(14).reshape(2, 7)
    expected, plan = build_model()(ids), plan_of(schedule)
    by_rank = [iter(split_into_stages(build_model(), plan, rank)) for rank in range(PP_SIZE)]
    x: Tensor = ids
    for stage in plan.stages:
        x = next(by_rank[stage.pp_rank])(x)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("schedule", ["GPipe", "LoopedBFS", "DualPipeV"])
def test_the_model_of_a_rank_names_the_parameters_of_its_stages_and_no_other(schedule: PpSchedule) -> None:
    whole, plan, seen = dict(build_model().named_parameters()), plan_of(schedule), []
    for rank in range(PP_SIZE):
        model = build_model()
        stages = split_into_stages(model, plan, rank)
        own = dict(model.named_parameters())
        assert {id(p) for p in own.values()} == {id(p) for stage in stages for p in stage.parameters()}
        assert {fqn for stage in stages for fqn, _ in stage.named_parameters()} == own.keys()
        seen += own
        for fqn, parameter in own.items():
            assert torch.equal(parameter, whole[fqn])
    assert sorted(seen) == sorted(whole)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_shard_plan_of_a_stage_is_what_planning_it_alone_gives_but_keeps_parameters_gathered(
    schedule: PpSchedule,
) -> None:
    config = FSDP2Config(dp_shard_size=2, replicate_params=("*norm.weight",), forward_prefetch_depth=2)
    job = read_job(None, [f"accelerator.pp_size={PP_SIZE}", "training.global_batch_size=8"]).job
    topology = Topology.resolve(job, 4)
    model = build_model()
    whole = plan_shards(model, config, topology, {})
    assert whole.whole_on == ("dense",)
    for stage in split_into_stages(model, plan_of(schedule), 0):
        alone = plan_shards(stage, replace(config, reshard_after_forward=False), topology, {})
        assert plan_stage_shards(whole, stage, config) == replace(alone, whole_on=whole.whole_on)


def test_a_stage_without_whole_parameters_knows_of_those_elsewhere() -> None:
    """Their placement is made by all ranks of the world together."""
    config = FSDP2Config(dp_shard_size=2, replicate_params=("lm_head.weight",))
    job = read_job(None, ["accelerator.pp_size=2", "training.global_batch_size=8"]).job
    model = build_model()
    whole = plan_shards(model, config, Topology.resolve(job, 4), {})
    (first,) = split_into_stages(model, plan_of("1F1B"), 0)
    plan = plan_stage_shards(whole, first, config)
    assert not any(parameter.is_replicated for unit in plan.units for parameter in unit.parameters)
    assert plan.whole_on == ("dense",)


def test_a_layer_with_experts_costs_the_experts_that_a_token_visits() -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "hidden_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 100}
    with torch.device("meta"):
        model = QWEN3_MOE.build(resolve_architecture("qwen3_moe", "debug", sizes))
    # Query, key, value and output projections, and two of the eight experts' three matrices.
    layer = 32 * 8 * (2 + 1 + 1 + 2) + 2 * 3 * 32 * 16
    assert measure_costs(model).head == pytest.approx(100 * 32 / layer, rel=1e-3)
