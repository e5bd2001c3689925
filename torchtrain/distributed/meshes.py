"""The device meshes of one pipeline stage, and the groups that reduce over them.

Rank layout is decided in ``topology``; this file only turns it into ``DeviceMesh`` objects. Whoever needs a mesh
selects one here and never builds its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
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

    fsdp_moe_mesh: DeviceMesh | None = None
    """Axes (edp_replicate, edp_shard, ep): all ranks of the stage again, for routed experts; None without ep."""

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
            root, axes = self.fsdp_moe_mesh, ("edp_replicate", "edp_shard")
            num_replicas = self.topology.edp_replicate_size
        return root[axes] if num_replicas > 1 else root[axes[1]]

    @property
    def token_group(self) -> ProcessGroup:
        """Group of all ranks that see different tokens: losses and token counts are summed over it."""
        return self.device_mesh["dp"].get_group()

    @property
    def dp_rank(self) -> int:
        """Which slice of the global batch this rank reads."""
        return self.device_mesh["dp"].get_local_rank()


def build_meshes(topology: Topology, device: torch.device) -> Meshes:
    """Build the meshes of every rank.

    Collective: the whole world, once, after the process group exists.
    """
    sizes = topology
    device_mesh = init_device_mesh(
        device.type, (sizes.dp_size, sizes.cp_size, sizes.tp_size), mesh_dim_names=("dp", "cp", "tp")
    )
    fsdp_non_moe_mesh = init_device_mesh(
        device.type,
        (sizes.dp_replicate_size, sizes.dp_shard_size, sizes.tp_size),
        mesh_dim_names=("fsdp_replicate", "fsdp_shard", "tp"),
    )
    fsdp_moe_mesh = None
    if sizes.ep_size > 1:
        fsdp_moe_mesh = init_device_mesh(
            device.type,
            (sizes.edp_replicate_size, sizes.edp_shard_size, sizes.ep_size),
            mesh_dim_names=("edp_replicate", "edp_shard", "ep"),
        )
    return Meshes(topology, device, device_mesh, fsdp_non_moe_mesh, fsdp_moe_mesh)
