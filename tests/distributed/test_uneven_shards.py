"""Rows that FSDP cuts within uneven tensor-parallel parts: in the right place, or nowhere."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from torchtrain.distributed.materialize import local_view
from torchtrain.testing.ranks import run_ranks


def look_at_shards(num_rows: int) -> str:
    """Say how a rank's rows and what is said of them compare; runs on a rank."""
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("fsdp", "tp"))
    whole = torch.arange(num_rows * 5.0).view(num_rows, 5)
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole.clone(), mesh["tp"], [Shard(0)]))
    fully_shard(module, mesh=mesh["fsdp"])
    try:
        local, slices = local_view(module.get_parameter("weight"))
    except RuntimeError as error:
        return str(error)
    return "right" if torch.equal(local, whole[tuple(slices)]) else "wrong"


def test_a_rank_knows_its_rows_or_says_that_it_does_not() -> None:
    assert run_ranks(look_at_shards, 6, 9) == ["right"] * 6
    # Which no job gets to: tests/unit/distributed/test_legality.py.
    said = run_ranks(look_at_shards, 6, 13)
    assert said[:4] == ["right"] * 4
    assert all("cannot be" in text for text in said[4:])
