"""Lines of the users' FSDP2 document that no other file shows; each test is named by its section."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, make_global_batch
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.fsdp2.accumulation import set_micro_batch_policy
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model


def build(*overrides: str) -> tuple[Run, nn.Module]:
    job = load_job(None, [*MODEL, "training.micro_batch_size=1", *overrides])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    run = Run(job, load_spec("llama"), architecture, meshes, is_main=False)
    return run, build_model(run).module


def groups_against_plan() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    run, model = build("fsdp_config.dp_shard_size=2")
    with torch.device("meta"):
        meta_model = run.spec.build(run.architecture)
    plan = FSDP2Manager(run.job.fsdp_config, run.meshes).plan(meta_model)
    owner_of = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    wrapped = {fqn: module for fqn, module in model.named_modules() if isinstance(module, FSDPModule)}
    groups = {
        fqn: {owner_of[id(p.sharded_param)] for g in module._get_fsdp_state()._fsdp_param_groups for p in g.fsdp_params}
        for fqn, module in wrapped.items()
    }
    return groups, {unit.fqn: {parameter.fqn for parameter in unit.parameters} for unit in plan.units}


def test_5_2_each_unit_holds_exactly_what_the_plan_says_so_the_root_came_last() -> None:
    # Wrapped before its blocks, the root would hold everything.
    groups, planned = run_ranks(groups_against_plan, 2)[0]
    assert groups == planned


def wrapped_modules() -> tuple[list[str], list[str], str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("torchtrain").addHandler(handler)
    logging.getLogger("torchtrain").setLevel(logging.INFO)
    _, model = build(f"fsdp_config.dp_shard_size={dist.get_world_size()}")
    blocks = [fqn for fqn, module in model.named_modules() if isinstance(module, DecoderBlock)]
    wrapped = [fqn for fqn, module in model.named_modules() if isinstance(module, FSDPModule)]
    return blocks, wrapped, "\n".join(records)


def test_5_2_every_block_is_wrapped() -> None:
    blocks, wrapped, said = run_ranks(wrapped_modules, 2)[0]
    assert wrapped == ["", *blocks]
    assert "FSDP wraps 2 transformer blocks and the root" in said


def test_5_2_one_device_skips_the_manager() -> None:
    blocks, wrapped, said = run_ranks(wrapped_modules, 1)[0]
    assert len(blocks) == 2
    assert wrapped == []
    assert "FSDP wraps" not in said


def gathered_after_forward(reshard: bool) -> dict[str, bool]:
    run, model = build("fsdp_config.dp_shard_size=2", f"fsdp_config.reshard_after_forward={str(reshard).lower()}")
    (batch, *_) = split_batch(make_global_batch(0, 8, 16), run.meshes.dp_rank, 2, 1)
    PretrainTask().token_losses(model, batch)
    # A sharded parameter is a DTensor, a gathered one a plain tensor.
    return {
        "root": not isinstance(model.norm.weight, DTensor),
        "block": not isinstance(model.layers["0"].mlp.up_proj.weight, DTensor),
    }


FORWARDS = SharedRanks(gathered_after_forward, {str(reshard): (2, (reshard,)) for reshard in (True, False)})


@pytest.mark.parametrize("reshard", [True, False])
def test_5_2_root_stays_gathered_and_children_do_as_told(reshard: bool, chosen_rows: list[str]) -> None:
    assert FORWARDS.take(str(reshard), chosen_rows)[0] == {"root": True, "block": not reshard}


def shard_degrees(dp_shard_size: int, *overrides: str) -> set[tuple[int, int]]:
    _, model = build(f"fsdp_config.dp_shard_size={dp_shard_size}", *overrides)
    degrees = set()
    for parameter in model.parameters():
        mesh = parameter.device_mesh
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        degrees.add((sizes["fsdp_shard"], sizes.get("fsdp_replicate", 1)))
    return degrees


DEGREES = SharedRanks(shard_degrees, {str(size): (4, (size,)) for size in (1, 2, 4)})


@pytest.mark.parametrize("dp_shard_size", [1, 2, 4])
def test_5_3_shard_degree_is_dp_shard_size(dp_shard_size: int, chosen_rows: list[str]) -> None:
    assert DEGREES.take(str(dp_shard_size), chosen_rows) == [{(dp_shard_size, 4 // dp_shard_size)}] * 4


def test_5_3_cp_does_not_widen_the_shard_degree() -> None:
    words = ("accelerator.cp_size=2", "accelerator.cp_mode=ring")
    assert run_ranks(shard_degrees, 4, 2, *words) == [{(2, 2)}] * 4


def local_weights_after_training() -> dict[str, Tensor]:
    run, model = build("fsdp_config.dp_shard_size=2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for batch in split_batch(make_global_batch(step, 8, 16), run.meshes.dp_rank, 4, 1):
            PretrainTask().token_losses(model, batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: parameter.to_local().detach().clone() for fqn, parameter in model.named_parameters()}


def test_5_3_replicas_hold_equal_weights_after_updates() -> None:
    # Ranks (0, 2) and (1, 3) hold the same shards of two replicas.
    outcomes = run_ranks(local_weights_after_training, 4)
    for first, second in ((0, 2), (1, 3)):
        for fqn, weight in outcomes[first].items():
            assert torch.equal(weight, outcomes[second][fqn]), fqn


def gathered_after_each_micro_batch(reshard: str) -> list[set[bool]]:
    run, model = build("fsdp_config.dp_shard_size=2", f"fsdp_config.reshard_after_backward={reshard}")
    batches = split_batch(make_global_batch(0, 8, 16), run.meshes.dp_rank, 2, 1)[:3]
    gathered = []
    for index, batch in enumerate(batches):
        set_micro_batch_policy(model, run.job.fsdp_config, is_last_micro_batch=index == len(batches) - 1)
        PretrainTask().token_losses(model, batch).sum().backward()
        gathered.append({not isinstance(parameter, DTensor) for parameter in model.parameters()})
    return gathered


MICRO_BATCHES = SharedRanks(gathered_after_each_micro_batch, {word: (2, (word,)) for word in ("true", "false")})


@pytest.mark.parametrize("reshard", ["true", "false"])
def test_5_9_only_the_last_micro_batch_reshards_after_backward(reshard: str, chosen_rows: list[str]) -> None:
    between = {reshard == "false"}
    assert MICRO_BATCHES.take(reshard, chosen_rows)[0] == [between, between, {False}]


def all_reduces_per_micro_batch(sync: str) -> list[int]:
    settings = ("dp_shard_size=2", "comm_fusion=true", f"requires_grad_sync={sync}")
    run, model = build(*(f"fsdp_config.{setting}" for setting in settings))
    counts = []
    batches = split_batch(make_global_batch(0, 8, 16), run.meshes.dp_rank, 2, 2)
    for index, batch in enumerate(batches):
        set_micro_batch_policy(model, run.job.fsdp_config, is_last_micro_batch=index == len(batches) - 1)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            PretrainTask().token_losses(model, batch).sum().backward()
        counts.append(sum("c10d::allreduce_" in event.name for event in profiler.events()))
    return counts


REDUCTIONS = SharedRanks(all_reduces_per_micro_batch, {word: (4, (word,)) for word in ("true", "false")})


@pytest.mark.parametrize("sync", ["true", "false"])
def test_5_10_replicas_all_reduce_on_the_last_micro_batch_only(sync: str, chosen_rows: list[str]) -> None:
    # Two blocks and the root, one all-reduce each.
    assert REDUCTIONS.take(sync, chosen_rows)[0] == [0, 3]
