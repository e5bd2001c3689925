"""Carries out the plugin's plan, before the outer FSDP wraps the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdpturbo.custom_shards import apply_custom_shards
from torchtrain.distributed.fsdpturbo.plan import FSDPTurboPlan
from torchtrain.distributed.meshes import Meshes


def apply_fsdpturbo(model: nn.Module, plan: FSDPTurboPlan, meshes: Meshes, config: FSDP2Config) -> nn.Module:
    """Shard experts where that is the plugin's own doing, and see to the gradients of what FSDP is to ignore."""
    if plan.custom_units:
        assert meshes.fsdp_moe_mesh is not None, "the plugin always has an expert mesh"
        apply_custom_shards(model, plan.custom_units, meshes.fsdp_moe_mesh, config)
    if plan.summed_parameters:
        model.register_forward_pre_hook(_GradientSums(plan.summed_parameters, meshes.loss_group).attach)
    return model


class _GradientSums:
    """All-reduces the gradients of parameters that every rank keeps whole.

    A gradient is summed before it is added to what earlier micro-batches left, so that nothing is summed twice.
    """

    def __init__(self, fqns: Sequence[str], group: dist.ProcessGroup) -> None:
        self._fqns = fqns
        self._group = group
        self._attached: dict[str, nn.Parameter] = {}

    def attach(self, model: nn.Module, _inputs: Any) -> None:
        """Hang a hook on each parameter that has none yet; a checkpoint may have put others in their place."""
        for fqn in self._fqns:
            parameter = model.get_parameter(fqn)
            if self._attached.get(fqn) is not parameter:
                parameter.register_hook(self._sum)
                self._attached[fqn] = parameter

    def _sum(self, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=self._group)
        return total
