"""FSDP2Manager: plans the shard units of a model and applies them with torch's ``fully_shard``.

It has no policy of its own: units, precision, prefetch and accumulation are sibling files that read the same plan. It
builds no mesh either: it selects one from ``Meshes``.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.precision import build_mixed_precision
from torchtrain.distributed.fsdp2.prefetch import apply_prefetch, fsdp_module
from torchtrain.distributed.fsdp2.shard_plan import ROOT, ShardPlan
from torchtrain.distributed.fsdp2.units import plan_shard_units
from torchtrain.distributed.meshes import Meshes
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)


class FSDP2Manager:
    """FSDP and HSDP for one model, or one pipeline stage of it."""

    def __init__(self, config: FSDP2Config, meshes: Meshes) -> None:
        self._config = config
        self._mesh = meshes.dense

    def plan(self, model: nn.Module) -> ShardPlan:
        """Decide the shard units of ``model``; changes nothing and needs no parameter memory."""
        names = self._mesh.mesh_dim_names or ()
        axes = tuple(zip(names, self._mesh.shape, strict=True))
        return ShardPlan(units=plan_shard_units(model, self._config), mesh_axes=axes)

    def parallelize(self, model: nn.Module, plan: ShardPlan) -> nn.Module:
        """Wrap the units of ``plan``, blocks first and the root last, in place.

        Gradients are summed over the mesh and divided by nothing: the loss already carries the one divisor, the global
        count of valid tokens (see ``docs/numerics.md``).

        Collective: every rank of the mesh.
        """
        mp_policy = build_mixed_precision(self._config.mix_precision)
        for unit in sorted(plan.units, key=lambda unit: unit.fqn == ROOT):
            fully_shard(
                model.get_submodule(unit.fqn),
                mesh=self._mesh,
                reshard_after_forward=unit.reshard_after_forward,
                mp_policy=mp_policy,
            )
            set_sum_reduction(fsdp_module(model, unit.fqn))
        apply_prefetch(model, plan)
        logger.info(plan.describe())
        return model


def set_sum_reduction(module: FSDPModule) -> None:
    """Make a unit's gradient reduction a plain sum."""
    module.set_gradient_divide_factor(1.0)
    # Without this torch asks for PREMUL_SUM, which gloo refuses and which would multiply by 1 elsewhere.
    module.set_force_sum_reduction_for_comms(True)
