"""The device meshes of one pipeline stage, and the groups that reduce over them.

Rank layout is decided in ``topology``; this file only turns it into ``DeviceMesh`` objects. Whoever needs a mesh
selects one here and never builds its own.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def dense(self) -> DeviceMesh:
        """Mesh that shards dense parameters.

        One-dimensional where nothing replicates: torch issues an all-reduce per unit on a 2-D mesh even over one rank.
        """
        if self.topology.dp_replicate_size == 1:
            return self.fsdp_non_moe_mesh["fsdp_shard"]
        return self.fsdp_non_moe_mesh["fsdp_replicate", "fsdp_shard"]

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
    return Meshes(topology, device, device_mesh, fsdp_non_moe_mesh)
