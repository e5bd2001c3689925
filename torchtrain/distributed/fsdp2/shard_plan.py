"""What FSDP will do to a model, as data: the dry run prints it, ``FSDP2Manager.parallelize`` applies it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchtrain.distributed.fsdp2.source_layout import SourceLayout

ROOT = ""
"""Fqn of the root unit."""

MeshName = Literal["dense", "expert"]


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter and where its pieces go."""

    fqn: str
    shape: tuple[int, ...]
    """Global shape, before any technique."""
    shard_dim: int = 0
    """Tensor dim that the shard axis splits; uneven sizes leave the last ranks with less, or nothing."""
    is_replicated: bool = False
    """Kept whole by ``replicate_params``."""
    source: SourceLayout | None = None
    """Layout that another technique gave it before."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are gathered and reduced together."""

    fqn: str
    """Module fqn; ``ROOT`` for what no other unit owns."""
    mesh: MeshName
    parameters: tuple[ShardedParameter, ...]
    reshard_after_forward: bool
    forward_prefetch: tuple[str, ...]
    """Units whose gathers this unit starts early in forward."""
    backward_prefetch: tuple[str, ...]
    """Units whose gathers this unit starts early in backward."""
    gradient_divisor: float = 1.0
    """What summed gradients are divided by. The gradient law knows one divisor only, and it is in the loss."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters, whole."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class ShardPlan:
    """Units in module order; the root stands first, because its parameters are needed first."""

    units: tuple[ShardUnit, ...]
    meshes: Mapping[MeshName, tuple[tuple[str, int], ...]]
    """Name and size of each axis of each mesh in use."""
    num_blocks: int
    """Transformer blocks among the units."""
    whole_on: tuple[MeshName, ...] = ()
    """Meshes on which some parameter of the whole model is kept whole, be it on another pipeline stage."""
    ignored: tuple[str, ...] = ()
    """Fqns of parameters that belong to somebody else: in no unit, neither sharded nor reduced by FSDP."""

    def describe(self) -> str:
        """One line for the log: how many blocks are wrapped, on which meshes."""
        counts = {name: sum(unit.mesh == name for unit in self.units) for name in self.meshes}
        parts = [f"FSDP wraps {_count(self.num_blocks, 'transformer block')} and the root on {self._axes('dense')}"]
        if experts := counts.get("expert"):
            parts.append(f"{_count(experts, 'expert unit')} on {self._axes('expert')}")
        if replicated := sum(p.is_replicated for unit in self.units for p in unit.parameters):
            parts.append(f"{_count(replicated, 'parameter')} kept whole")
        return ", ".join(parts)

    def _axes(self, mesh: MeshName) -> str:
        return f"mesh ({' x '.join(f'{name} {size}' for name, size in self.meshes[mesh])})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
