"""Which parameters travel together: one unit per decoder block, one per routed-expert module, then the root.

Pure: reads names, shapes and stated layouts of a model; a meta-device one will do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from torch import nn

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.prefetch import plan_prefetch
from torchtrain.distributed.fsdp2.replicate import resolve_replicate_params
from torchtrain.distributed.fsdp2.shard_plan import ROOT, MeshName, ShardedParameter, ShardPlan, ShardUnit
from torchtrain.distributed.fsdp2.source_layout import SourceLayout, aliases_by_parameter, resolve_source_layouts
from torchtrain.distributed.topology import Topology
from torchtrain.errors import ConfigError, Fault
from torchtrain.nn.decoder_block import DecoderBlock


def plan_shards(
    model: nn.Module,
    config: FSDP2Config,
    topology: Topology,
    source_layouts: Mapping[str, SourceLayout],
    ignored: Collection[str] = (),
) -> ShardPlan:
    """Group the parameters of a decoder, or of one pipeline stage of it, into shard units.

    A decoder block is a unit whatever container holds it, and so is a module that owns parameters laid out over ``ep``.
    The deepest unit owns a parameter. What no unit owns, and what is tied across units, belongs to the root.

    Args:
        model: The decoder, or a stage of it.
        config: Section ``fsdp_config``.
        topology: Sizes of the meshes.
        source_layouts: By fqn.
        ignored: Fqns of parameters that belong to somebody else.

    Returns:
        The plan; its units cover every other parameter exactly once.

    Raises:
        ConfigError: ``replicate_params`` or ``source_layouts`` do not fit the model.
    """
    layouts = {fqn: layout for fqn, layout in source_layouts.items() if fqn not in ignored}
    sources = resolve_source_layouts(model, layouts)
    replicated = resolve_replicate_params(model, config.replicate_params)
    _refuse_ignored_replicas(replicated, ignored)
    block_fqns = {fqn for fqn, module in model.named_modules() if isinstance(module, DecoderBlock)}
    expert_fqns = {fqn.rpartition(".")[0] for fqn, layout in sources.items() if layout.axis == "ep"}
    unit_fqns = [fqn for fqn, _ in model.named_modules() if fqn in block_fqns | expert_fqns]
    owners = _owners(model, unit_fqns)
    owned: dict[str, list[ShardedParameter]] = {fqn: [] for fqn in (ROOT, *unit_fqns)}
    for fqn, parameter in model.named_parameters():
        if fqn in ignored:
            continue
        shape, is_replicated = tuple(parameter.shape), fqn in replicated
        is_expert = owners[fqn] in expert_fqns and not is_replicated
        shard_dim = _expert_shard_dim(shape, topology) if is_expert else 0
        owned[owners[fqn]].append(ShardedParameter(fqn, shape, shard_dim, is_replicated, sources.get(fqn)))
    _refuse_mixed_units(owned, expert_fqns)
    unit_fqns = [fqn for fqn in unit_fqns if owned[fqn]]
    owned = {fqn: owned[fqn] for fqn in (ROOT, *unit_fqns)}
    forward = plan_prefetch((ROOT, *unit_fqns), config.forward_prefetch_depth)
    backward = plan_prefetch(tuple(reversed(unit_fqns)), config.backward_prefetch_depth, first=ROOT)
    units = tuple(
        ShardUnit(
            fqn=fqn,
            mesh="expert" if fqn in expert_fqns else "dense",
            parameters=tuple(parameters),
            # The root's parameters are needed again as soon as backward begins.
            reshard_after_forward=config.reshard_after_forward and fqn != ROOT,
            forward_prefetch=forward[fqn],
            backward_prefetch=backward[fqn],
        )
        for fqn, parameters in owned.items()
    )
    return ShardPlan(
        units,
        _mesh_axes(topology, has_experts=bool(expert_fqns)),
        num_blocks=len(block_fqns & set(unit_fqns)),
        whole_on=tuple(sorted({unit.mesh for unit in units if any(p.is_replicated for p in unit.parameters)})),
        ignored=tuple(fqn for fqn, _ in model.named_parameters() if fqn in ignored),
    )


def plan_stage_shards(whole: ShardPlan, stage: nn.Module, config: FSDP2Config) -> ShardPlan:
    """Take the units of one pipeline stage out of the plan of the whole model.

    Parameters stay gathered from the first micro-batch of a step to the last, so no unit reshards after forward:
    interleaved micro-batches would gather the same layers again and again.

    Args:
        whole: Plan of the model before it was split.
        stage: The stage, any device; its root holds what no block of it owns.
        config: Section ``fsdp_config``.
    """
    here = {fqn for fqn, _ in stage.named_parameters()}
    kept = {
        unit.fqn: tuple(parameter for parameter in unit.parameters if parameter.fqn in here) for unit in whole.units
    }
    fqns = [fqn for fqn, parameters in kept.items() if fqn != ROOT and parameters]
    forward = plan_prefetch((ROOT, *fqns), config.forward_prefetch_depth)
    backward = plan_prefetch(tuple(reversed(fqns)), config.backward_prefetch_depth, first=ROOT)
    units = tuple(
        replace(
            unit,
            parameters=kept[unit.fqn],
            reshard_after_forward=False,
            forward_prefetch=forward[unit.fqn],
            backward_prefetch=backward[unit.fqn],
        )
        for unit in whole.units
        if unit.fqn in (ROOT, *fqns)
    )
    blocks = [fqn for fqn in fqns if isinstance(stage.get_submodule(fqn), DecoderBlock)]
    return replace(whole, units=units, num_blocks=len(blocks))


def _mesh_axes(topology: Topology, *, has_experts: bool) -> dict[MeshName, tuple[tuple[str, int], ...]]:
    dense = (("fsdp_replicate", topology.dp_replicate_size), ("fsdp_shard", topology.dp_shard_size))
    expert = tuple(zip(topology.expert_axes, (topology.edp_replicate_size, topology.edp_shard_size), strict=True))
    axes: dict[MeshName, tuple[tuple[str, int], ...]] = {"dense": dense}
    if has_experts:
        axes["expert"] = expert
    # An axis of one replica is left out, as ``Meshes`` leaves it out of the mesh.
    return {name: pair if pair[0][1] > 1 else pair[1:] for name, pair in axes.items()}


def _owners(model: nn.Module, unit_fqns: list[str]) -> dict[str, str]:
    owners = {}
    for aliases in aliases_by_parameter(model).values():
        candidates = {_deepest(fqn, unit_fqns) for fqn in aliases}
        owners[aliases[0]] = candidates.pop() if len(candidates) == 1 else ROOT
    return owners


def _deepest(fqn: str, unit_fqns: list[str]) -> str:
    inside = [unit for unit in unit_fqns if fqn.startswith(f"{unit}.")]
    return max(inside, key=len, default=ROOT)


def _expert_shard_dim(shape: tuple[int, ...], topology: Topology) -> int:
    """Dim 0 holds whole experts; where they do not split evenly, dim 1 avoids padding with whole experts."""
    num_local_experts = shape[0] // topology.ep_size
    splits_evenly = num_local_experts % topology.edp_shard_size == 0
    can_split_dim_1 = len(shape) > 1 and shape[1] % topology.edp_shard_size == 0
    return 1 if not splits_evenly and can_split_dim_1 else 0


def _refuse_ignored_replicas(replicated: Collection[str], ignored: Collection[str]) -> None:
    faults = [
        Fault(
            "fsdp_config.replicate_params",
            fqn,
            "names a parameter that the plugin fsdpturbo keeps out of FSDP",
            "leave it out, or use dist_config.fsdp_implementation: native for an expert's",
        )
        for fqn in sorted(set(replicated) & set(ignored))
    ]
    if faults:
        raise ConfigError(faults)


def _refuse_mixed_units(owned: Mapping[str, list[ShardedParameter]], expert_fqns: set[str]) -> None:
    faults = [
        Fault(
            f"source layout of {parameter.fqn}",
            None if parameter.source is None else str(parameter.source),
            f"must be on ep like the other parameters of the expert module {unit}",
            "state its ep layout, or move it out of that module",
        )
        for unit in expert_fqns
        for parameter in owned.get(unit, [])
        if parameter.source is None or parameter.source.axis != "ep"
    ]
    if faults:
        raise ConfigError(faults)
