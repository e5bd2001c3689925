"""The device meshes of this rank's pipeline stage, and the groups that reduce over them.

Each is a slice of a mesh of the whole world whose first axis is pp: torch wants one root for all meshes of a DTensor.
Each has such a mesh of its own, because its other axes cut a stage in its own way, and a mesh has one set of axes.
Rank layout is decided in ``topology``; this file only turns it into ``DeviceMesh`` objects. Whoever needs a mesh
selects one here and never builds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtrain.distributed.topology import Topology


@dataclass(frozen=True)
class Meshes:
    """Live meshes of this rank."""

    topology: Topology
    device: torch.device
    device_mesh: DeviceMesh
    """Axes (dp, cp, tp): batches, loss, tensor and context parallel."""
    fsdp_non_moe_mesh: DeviceMesh
    """Axes (fsdp_replicate, fsdp_shard, tp): the same ranks, dp x cp reshaped for dense parameters."""
    loss_group: ProcessGroup
    """Ranks whose token losses differ, pp x dp x cp: losses are summed over it, a stage without a head adds 0."""
    fsdp_moe_mesh: DeviceMesh | None = None
    """All ranks of the stage again, for routed experts: axes (edp_replicate, edp_shard, ep), or (expert_cp, efsdp, ep)
    under fsdpturbo; None without expert parallelism."""
    pp_mesh: DeviceMesh | None = None
    """The ranks that stand at the same place of each stage, in the order of the stages; None without pp."""

    def of_units(self, name: Literal["dense", "expert"]) -> DeviceMesh:
        """The mesh that shards the units of a plan.

        One-dimensional where nothing replicates: torch issues an all-reduce per unit on a 2-D mesh even over one rank.
        """
        root, axes, num_replicas = (
            self.fsdp_non_moe_mesh,
            ("fsdp_replicate", "fsdp_shard"),
            self.topology.dp_replicate_size,
        )
        if name == "expert":
            assert self.fsdp_moe_mesh is not None, "expert units need an ep axis"
            root, axes = self.fsdp_moe_mesh, self.topology.expert_axes
            num_replicas = self.topology.edp_replicate_size
        return root[axes] if num_replicas > 1 else root[axes[1]]

    @property
    def dp_rank(self) -> int:
        """Which slice of the global batch this rank reads."""
        return self.device_mesh["dp"].get_local_rank()

    @property
    def cp_rank(self) -> int:
        """Which tokens of its sequences this rank computes."""
        return self.device_mesh["cp"].get_local_rank()

    @property
    def pp_group(self) -> ProcessGroup | None:
        """One rank of each stage, this one among them; None without pp."""
        return None if self.pp_mesh is None else self.pp_mesh.get_group()

    @property
    def pp_rank(self) -> int:
        """Which stage of the pipeline this rank is in."""
        return 0 if self.pp_mesh is None else self.pp_mesh.get_local_rank()

    @property
    def counts_its_batch(self) -> bool:
        """Whether this rank speaks for the batch that it reads, among all that read the same one."""
        return self.pp_rank == 0 and self.cp_rank == 0 and self.device_mesh["tp"].get_local_rank() == 0


def build_meshes(topology: Topology, device: torch.device) -> Meshes:
    """Build the meshes of every rank.

    Collective: the whole world, once, after the process group exists.
    """
    sizes = topology

    def of_stage(**axes: int) -> DeviceMesh:
        world = init_device_mesh(device.type, (sizes.pp_size, *axes.values()), mesh_dim_names=("pp", *axes))
        return world[tuple(axes)]

    world = init_device_mesh(
        device.type,
        (sizes.pp_size, sizes.dp_size, sizes.cp_size, sizes.tp_size),
        mesh_dim_names=("pp", "dp", "cp", "tp"),
    )
    return Meshes(
        topology,
        device,
        device_mesh=world["dp", "cp", "tp"],
        fsdp_non_moe_mesh=of_stage(
            fsdp_replicate=sizes.dp_replicate_size, fsdp_shard=sizes.dp_shard_size, tp=sizes.tp_size
        ),
        fsdp_moe_mesh=_build_expert_mesh(topology, device, of_stage) if topology.has_expert_mesh else None,
        pp_mesh=world["pp"] if sizes.pp_size > 1 else None,
        loss_group=_group_without_tp(world),
    )


def _build_expert_mesh(topology: Topology, device: torch.device, of_stage: Callable[..., DeviceMesh]) -> DeviceMesh:
    if not topology.is_fsdpturbo:
        sizes = {"edp_replicate": topology.edp_replicate_size, "edp_shard": topology.edp_shard_size}
        return of_stage(**sizes, ep=topology.ep_size)
    grid = topology.fsdpturbo_mesh_ranks()
    # The plugin's ranks with its axes in another order: FSDP wants the replicate axis before the shard axis, and a
    # slice of a mesh keeps the order of the mesh.
    names = ("edp", "expert_cp", "efsdp", "ep")
    ranks = torch.tensor(grid.nested()).permute([grid.axis_names.index(name) for name in names])
    return DeviceMesh(device.type, ranks.contiguous(), mesh_dim_names=names)[names[1:]]


def _group_without_tp(world: DeviceMesh) -> ProcessGroup:
    """The ranks at this rank's place on the tp axis.

    Collective: the whole world.
    """
    columns = world.mesh.flatten(0, 2).T
    groups = [dist.new_group(ranks.tolist()) for ranks in columns]
    return cast(ProcessGroup, groups[world["tp"].get_local_rank()])
