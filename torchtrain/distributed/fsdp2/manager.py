"""FSDP2Manager: plans the shard units of a model and applies them with torch's ``fully_shard``.

It has no policy of its own: units, precision, replicated parameters, prefetch and accumulation are sibling files that
read the same plan. It builds no mesh either: it selects one from ``Meshes``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.comm_fusion import apply_comm_fusion
from torchtrain.distributed.fsdp2.main_grad import apply_main_grad
from torchtrain.distributed.fsdp2.offload import build_offload_policy
from torchtrain.distributed.fsdp2.precision import build_mixed_precision
from torchtrain.distributed.fsdp2.prefetch import apply_prefetch, fsdp_module
from torchtrain.distributed.fsdp2.replicate import ShardPlacementResult, build_whole_placement
from torchtrain.distributed.fsdp2.shard_plan import ROOT, MeshName, ShardedParameter, ShardPlan, ShardUnit
from torchtrain.distributed.fsdp2.shared_parameters import held_by_root
from torchtrain.distributed.fsdp2.source_layout import SourceLayout, aliases_by_parameter, check_source_layouts
from torchtrain.distributed.fsdp2.units import plan_shards, plan_stage_shards
from torchtrain.distributed.meshes import Meshes
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)


class FSDP2Manager:
    """FSDP and HSDP for one model, or one pipeline stage of it."""

    def __init__(self, config: FSDP2Config, meshes: Meshes) -> None:
        self._config = config
        self._meshes = meshes
        self._whole_placements: dict[MeshName, ShardPlacementResult] = {}

    def plan(
        self,
        model: nn.Module,
        source_layouts: Mapping[str, SourceLayout] | None = None,
        ignored: Collection[str] = (),
    ) -> ShardPlan:
        """Decide the shard units of ``model``; changes nothing and needs no parameter memory.

        Args:
            model: The final model, any device.
            source_layouts: What tensor and expert parallelism did to parameters, by fqn.
            ignored: Fqns of parameters that somebody else shards or sums.

        Raises:
            ConfigError: ``replicate_params`` or ``source_layouts`` do not fit the model.
        """
        return plan_shards(model, self._config, self._meshes.topology, source_layouts or {}, ignored)

    def plan_stage(self, whole: ShardPlan, stage: nn.Module) -> ShardPlan:
        """Cut the plan of a whole model down to one pipeline stage of it; see `plan_stage_shards`."""
        return plan_stage_shards(whole, stage, self._config)

    def parallelize(self, model: nn.Module, plan: ShardPlan) -> nn.Module:
        """Wrap the units of ``plan``, the deepest first and the root last, in place.

        Gradients are summed over the mesh and divided by nothing: the loss already carries the one divisor, the global
        count of valid tokens (see ``docs/numerics.md``).

        Raises:
            ConfigError: A parameter is not laid out as the plan was told.

        Collective: every rank of the stage; the whole world, once per mesh, where the model keeps parameters whole.
        """
        for mesh in plan.whole_on:
            self._whole_placement(mesh)
        parameters = [parameter for unit in plan.units for parameter in unit.parameters]
        check_source_layouts(model, {parameter.fqn: parameter.source for parameter in parameters}, plan.ignored)
        planned = {id(model.get_parameter(parameter.fqn)): parameter for parameter in parameters}
        root, *inner = plan.units
        aliases = {names[0]: names for names in aliases_by_parameter(model).values()}
        inside = tuple(f"{unit.fqn}." for unit in inner)
        borrowed = [p.fqn for p in root.parameters if any(name.startswith(inside) for name in aliases[p.fqn])]
        foreign = {model.get_parameter(fqn) for fqn in plan.ignored}
        ignored = foreign | {model.get_parameter(fqn) for fqn in borrowed}
        # Module order lists a unit before those inside it; deepest first is that order backwards.
        for unit in reversed(inner):
            self._wrap(model, unit, planned, ignored)
        with held_by_root(model, borrowed):
            self._wrap(model, root, planned, foreign)
        apply_prefetch(model, plan)
        apply_comm_fusion(model, self._config)
        if self._config.mix_precision.fp32_main_grad:
            apply_main_grad(model)
        logger.info(plan.describe())
        return model

    def _wrap(
        self, model: nn.Module, unit: ShardUnit, planned: Mapping[int, ShardedParameter], ignored: set[nn.Parameter]
    ) -> None:
        def place(parameter: nn.Parameter) -> Shard | ShardPlacementResult:
            plan = planned[id(parameter)]
            return self._whole_placement(unit.mesh) if plan.is_replicated else Shard(plan.shard_dim)

        fully_shard(
            model.get_submodule(unit.fqn),
            mesh=self._meshes.of_units(unit.mesh),
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=place,
            mp_policy=build_mixed_precision(self._config.mix_precision, is_root=unit.fqn == ROOT),
            offload_policy=build_offload_policy(self._config, self._meshes.device),
            ignored_params=ignored,
        )
        set_sum_reduction(fsdp_module(model, unit.fqn), unit.gradient_divisor)

    def _whole_placement(self, mesh: MeshName) -> ShardPlacementResult:
        """Built once per mesh, as torch compares these by identity.

        Collective: the whole world, the first time.
        """
        if mesh not in self._whole_placements:
            self._whole_placements[mesh] = build_whole_placement(self._meshes.of_units(mesh))
        return self._whole_placements[mesh]


def set_sum_reduction(module: FSDPModule, divisor: float) -> None:
    """Make a unit's gradient reduction a plain sum, divided by the plan's divisor."""
    module.set_gradient_divide_factor(divisor)
    # Without this torch asks for PREMUL_SUM, which gloo refuses and which would multiply by 1 elsewhere.
    module.set_force_sum_reduction_for_comms(True)
