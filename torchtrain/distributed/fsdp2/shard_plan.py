"""What FSDP will do to a model, as data: the dry run prints it, ``FSDP2Manager.parallelize`` applies it."""

from __future__ import annotations

from dataclasses import dataclass

ROOT = ""
"""Fqn of the root unit."""


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter and where its pieces go."""

    fqn: str
    shape: tuple[int, ...]
    shard_dim: int = 0
    """Tensor dim that the shard axis splits; uneven sizes leave the last ranks with less, or nothing."""


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are gathered and reduced together."""

    fqn: str
    """Module fqn; ``ROOT`` for what no block owns."""
    parameters: tuple[ShardedParameter, ...]
    reshard_after_forward: bool
    forward_prefetch: tuple[str, ...]
    """Units whose gathers this unit starts early in forward."""
    backward_prefetch: tuple[str, ...]
    """Units whose gathers this unit starts early in backward."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters, whole."""
        total = 0
        for parameter in self.parameters:
            count = 1
            for size in parameter.shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True)
class ShardPlan:
    """Units in execution order; the root stands first, because its parameters are needed first."""

    units: tuple[ShardUnit, ...]
    mesh_axes: tuple[tuple[str, int], ...]
    """Name and size of each axis of the mesh that shards them."""

    @property
    def blocks(self) -> tuple[ShardUnit, ...]:
        """All units but the root."""
        return tuple(unit for unit in self.units if unit.fqn != ROOT)

    def describe(self) -> str:
        """One line for the log: how many blocks are wrapped, on which mesh."""
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh_axes)
        count = len(self.blocks)
        return f"FSDP wraps {count} transformer block{'s' if count != 1 else ''} and the root on mesh ({mesh})"
