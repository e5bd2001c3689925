"""Live meshes against the rank arithmetic of `topology`, which is their oracle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from torchtrain.config.load import read_job
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.testing.ranks import run_ranks

# tp, cp, ep, dp_shard, edp_shard on four ranks.
SIZES = [
    (1, 1, 1, 4, 1),
    (1, 1, 1, 2, 1),
    (1, 1, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (1, 2, 1, 2, 1),
    (2, 2, 1, 1, 1),
    (1, 1, 2, 4, 2),
    (2, 1, 2, 1, 1),
    (1, 2, 4, 4, 1),
    (4, 1, 2, 1, 2),
]


def groups_of_this_rank(topologies: list[Topology]) -> list[dict[str, dict[str, tuple[int, ...]]]]:
    found = []
    for topology in topologies:
        meshes = build_meshes(topology, torch.device("cpu"))
        named = {"device": meshes.device_mesh, "dense": meshes.fsdp_non_moe_mesh, "moe": meshes.fsdp_moe_mesh}
        found.append(
            {
                name: {
                    axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in mesh.mesh_dim_names
                }
                for name, mesh in named.items()
                if mesh is not None
            }
        )
    return found


@pytest.fixture(scope="module")
def topologies() -> list[Topology]:
    jobs = [
        read_job(
            None,
            [
                f"accelerator={{tp_size: {tp}, cp_size: {cp}, ep_size: {ep}}}",
                f"fsdp_config={{dp_shard_size: {shard}, edp_shard_size: {edp_shard}}}",
            ],
        ).job
        for tp, cp, ep, shard, edp_shard in SIZES
    ]
    return [Topology.resolve(job, 4) for job in jobs]


@pytest.fixture(scope="module")
def by_rank(topologies: list[Topology]) -> list[list[dict[str, dict[str, tuple[int, ...]]]]]:
    return run_ranks(groups_of_this_rank, 4, topologies)


@pytest.mark.parametrize("case", range(len(SIZES)), ids=lambda case: str(SIZES[case]))
def test_groups_of_the_meshes_are_those_of_the_arithmetic(topologies, by_rank, case) -> None:
    topology = topologies[case]
    grids = {"device": topology.device_mesh_ranks(), "dense": topology.fsdp_non_moe_mesh_ranks()}
    if topology.ep_size > 1:
        grids["moe"] = topology.fsdp_moe_mesh_ranks()
    for rank, found in enumerate(by_rank):
        assert found[case] == {
            name: {axis: next(group for group in grid.groups(axis) if rank in group) for axis in grid.axis_names}
            for name, grid in grids.items()
        }


def plugin_groups_of_this_rank(topology: Topology) -> dict[str, tuple[int, ...]]:
    mesh = build_meshes(topology, torch.device("cpu")).fsdp_moe_mesh
    assert mesh is not None
    return {axis: tuple(dist.get_process_group_ranks(mesh[axis].get_group())) for axis in mesh.mesh_dim_names or ()}


@pytest.mark.parametrize(("cp", "ep"), [(2, 2), (1, 2), (1, 4), (1, 1)])
def test_groups_of_the_plugins_expert_mesh_are_those_of_the_arithmetic(cp: int, ep: int) -> None:
    words = [f"dist_config={{name: fsdpturbo, ep_size: {ep}}}", f"accelerator.cp_size={cp}"]
    topology = Topology.resolve(read_job(None, words).job, 4)
    grid = topology.fsdpturbo_mesh_ranks()
    for rank, found in enumerate(run_ranks(plugin_groups_of_this_rank, 4, topology)):
        for axis in ("efsdp", "ep", "expert_cp"):
            assert found[axis] == next(group for group in grid.groups(axis) if rank in group)
