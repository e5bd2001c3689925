"""Layouts that tensor and expert parallelism gave to parameters before FSDP comes: stated by fqn, checked by name.

The planner states them, so that a plan needs no process group; ``FSDP2Manager.parallelize`` compares them with what the
parameters really are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from torchtrain.config.nearest import suggest_fqns
from torchtrain.errors import ConfigError, Fault

SourceAxis = Literal["tp", "ep"]


@dataclass(frozen=True)
class SourceLayout:
    """One parameter's place on the axis of the technique that was there first."""

    axis: SourceAxis
    placement: Placement
    """``Shard(dim)`` or ``Replicate()`` on that axis; ``Partial`` is not a layout that a parameter can have."""

    def __str__(self) -> str:
        return f"{self.placement} on {self.axis}"


def aliases_by_parameter(model: nn.Module) -> dict[int, list[str]]:
    """All fqns of each parameter, by ``id``; a tied parameter has several, the first is the one it is known by."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return names


def resolve_source_layouts(model: nn.Module, layouts: Mapping[str, SourceLayout]) -> dict[str, SourceLayout]:
    """Bring layouts stated under any alias to the fqn that ``named_parameters`` gives.

    Args:
        model: The final model, on any device.
        layouts: Fqn to layout, as the planner states them.

    Raises:
        ConfigError: An fqn that the model does not have, a ``Partial`` placement, or two aliases of one parameter with
            different layouts; all of them at once.
    """
    faults = [*_find_unknown(model, layouts), *_find_partial(layouts)]
    resolved: dict[str, SourceLayout] = {}
    for aliases in aliases_by_parameter(model).values():
        stated = {fqn: layouts[fqn] for fqn in aliases if fqn in layouts}
        if len(set(stated.values())) > 1:
            listed = ", ".join(f"{fqn}: {layout}" for fqn, layout in stated.items())
            rule = "is one tied parameter and must have one layout"
            faults.append(
                Fault(f"source layout of {aliases[0]}", listed, rule, "state the same layout for all its names")
            )
        elif stated:
            resolved[aliases[0]] = next(iter(stated.values()))
    if faults:
        raise ConfigError(faults)
    return resolved


def check_source_layouts(
    model: nn.Module, resolved: Mapping[str, SourceLayout | None], ignored: Collection[str] = ()
) -> None:
    """Compare stated layouts with the parameters as they are.

    Args:
        model: The final model.
        resolved: Layout of each parameter by its first fqn; None or missing for a plain tensor.
        ignored: Fqns of parameters that may be anything.

    Raises:
        ConfigError: A parameter is laid out otherwise than stated, or over more axes than one.
    """
    faults = []
    for fqn, parameter in model.named_parameters():
        if fqn in ignored:
            continue
        if isinstance(parameter.data, DTensor) and parameter.data.device_mesh.ndim > 1:
            axes = ", ".join(parameter.data.device_mesh.mesh_dim_names or ("without names",))
            rule = f"must be on one axis, and the parameter is a DTensor on a mesh of several ({axes})"
            fix = "lay it out over tp or ep alone, and leave the other axes to FSDP"
            faults.append(Fault(f"source layout of {fqn}", str(parameter.data.placements), rule, fix))
            continue
        actual = _actual_layout(parameter)
        if actual != (stated := resolved.get(fqn)):
            rule = f"must be what the parameter is: {actual or 'a plain tensor'}"
            shown = None if stated is None else str(stated)
            faults.append(Fault(f"source layout of {fqn}", shown, rule, "state the layout that was applied"))
    if faults:
        raise ConfigError(faults)


def _find_unknown(model: nn.Module, layouts: Mapping[str, SourceLayout]) -> Iterator[Fault]:
    known = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    for fqn in layouts:
        if fqn not in known:
            rule = "must name a parameter of the model"
            yield Fault("source layout", fqn, rule, suggest_fqns(fqn, known))


def _find_partial(layouts: Mapping[str, SourceLayout]) -> Iterator[Fault]:
    for fqn, layout in layouts.items():
        if layout.placement.is_partial():
            rule = "must be a Shard or Replicate: a parameter is never a pending sum"
            yield Fault(f"source layout of {fqn}", str(layout), rule, "reduce it before FSDP wraps it")


def _actual_layout(parameter: nn.Parameter) -> SourceLayout | None:
    if not isinstance(parameter.data, DTensor):
        return None
    (axis,) = parameter.data.device_mesh.mesh_dim_names or ("",)
    return SourceLayout(cast(SourceAxis, axis), parameter.data.placements[0])
