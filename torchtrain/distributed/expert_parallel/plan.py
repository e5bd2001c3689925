"""What expert parallelism does to a model, as data. Pure: reads names and shapes; a meta model will do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from torchtrain.config.rules import nearest_divisors
from torchtrain.errors import ConfigError, Fault
from torchtrain.nn.moe import MoE


@dataclass(frozen=True)
class ExpertLayer:
    """One layer with experts."""

    fqn: str
    num_experts: int
    """Of the whole layer; a rank has this over ``ep_size``."""
    parameters: tuple[str, ...]
    """Fqns of the stacked weights, each split along dim 0."""


@dataclass(frozen=True)
class ExpertParallelPlan:
    """All that ``apply_expert_parallel`` does, in module order."""

    ep_size: int
    layers: tuple[ExpertLayer, ...]
    are_tokens_split: bool
    """Every rank of a tp axis has the same tokens, so that each sends a share of them and none is sent twice."""

    @property
    def placements(self) -> dict[str, Placement]:
        """Placement on the ep axis of each parameter that becomes a DTensor."""
        return {fqn: Shard(0) for layer in self.layers for fqn in layer.parameters}


def plan_expert_parallel(
    model: nn.Module, *, ep_size: int, tp_size: int, is_sequence_parallel: bool
) -> ExpertParallelPlan:
    """Find the experts of a model and say how they are split.

    Args:
        model: On any device, meta included.
        ep_size: Ranks that the experts are split over.
        tp_size: Ranks of the tp axis.
        is_sequence_parallel: Whether those have different tokens between blocks.

    Raises:
        ConfigError: ``ep_size`` does not divide the experts of a layer; all layers at once.
    """
    layers = tuple(_expert_layers(model))
    faults = [
        Fault(
            "accelerator.ep_size",
            ep_size,
            f"must divide the {layer.num_experts} experts of {layer.fqn}",
            f"use {nearest_divisors(ep_size, of=layer.num_experts)}",
        )
        for layer in layers
        if layer.num_experts % ep_size
    ]
    if faults:
        raise ConfigError(faults)
    return ExpertParallelPlan(ep_size, layers, are_tokens_split=tp_size > 1 and not is_sequence_parallel)


def _expert_layers(model: nn.Module) -> Iterator[ExpertLayer]:
    for fqn, module in model.named_modules():
        if isinstance(module, MoE):
            names = tuple(f"{fqn}.experts.{name}" for name, _ in module.experts.named_parameters())
            yield ExpertLayer(fqn, module.router.config.num_experts, names)
