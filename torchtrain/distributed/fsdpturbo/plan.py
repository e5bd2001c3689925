"""Which parameters are the experts', which are kept out of the outer FSDP, and whose hooks gather. Pure.

Reads names and shapes of a model that expert parallelism has been applied to; a meta-device one will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from torchtrain.config.nearest import suggest_fqns
from torchtrain.config.parallel import DistConfig
from torchtrain.distributed.fsdpturbo.legality import FSDPTurboModel
from torchtrain.errors import ConfigError, Fault


@dataclass(frozen=True)
class CustomUnit:
    """One module of experts that ``fsdp_implementation: custom`` gathers and reduces."""

    fqn: str
    carrier: str
    """Fqn of the module whose forward and backward drive it."""
    shard_dims: dict[str, int]
    """Name of each weight to the dim that efsdp splits."""


@dataclass(frozen=True)
class FSDPTurboPlan:
    """What the plugin does before the outer FSDP comes."""

    expert_modules: tuple[str, ...]
    """Fqns."""
    custom_units: tuple[CustomUnit, ...]
    """Empty with ``fsdp_implementation: native``: then FSDP2 shards experts, on the plugin's mesh."""
    summed_parameters: tuple[str, ...]
    """Fqns of trainable parameters that ``fsdp_ignored_modules`` keeps whole: their gradients are all-reduced."""
    ignored_parameters: frozenset[str]
    """Fqns of all that the outer FSDP must leave alone."""


def plan_fsdpturbo(
    model: nn.Module, config: DistConfig, registered: FSDPTurboModel, *, efsdp_size: int
) -> FSDPTurboPlan:
    """Resolve the patterns of the family and of the job.

    Raises:
        ConfigError: A pattern matches nothing, or a hook module holds no experts, or a weight cannot be split by
            ``custom``; all at once.
    """
    modules = dict(model.named_modules())
    experts = tuple(fqn for fqn in modules if _matches(fqn, registered.expert_modules))
    faults = [*_find_unmatched(modules, config), *_find_idle_hooks(modules, experts, config)]
    if not experts:
        rule = f"registers {', '.join(registered.expert_modules)} as experts, which its model does not have"
        faults.append(Fault("dist_config.name", "fsdpturbo", f"the family {rule}", "correct its FSDPTURBO"))
    inside_experts = {id(parameter) for fqn in experts for parameter in modules[fqn].parameters()}
    chosen = [module for fqn, module in modules.items() if _matches(fqn, config.fsdp_ignored_modules)]
    kept_out = {id(parameter) for module in chosen for parameter in module.parameters()} - inside_experts
    named = list(model.named_parameters())
    units: list[CustomUnit] = []
    if config.fsdp_implementation == "custom":
        for fqn in experts:
            unit = CustomUnit(fqn, _carrier(modules, fqn, config.hook_modules), {})
            for name, weight in modules[fqn].named_parameters():
                dim = _choose_dim(weight, efsdp_size)
                if dim is None:
                    faults.append(_unsplittable(f"{fqn}.{name}", weight, efsdp_size))
                else:
                    unit.shard_dims[name] = dim
            units.append(unit)
    if faults:
        raise ConfigError(faults)
    ignored = {fqn for fqn, parameter in named if id(parameter) in kept_out}
    if units:
        ignored |= {fqn for fqn, parameter in named if id(parameter) in inside_experts}
    summed = tuple(fqn for fqn, parameter in named if id(parameter) in kept_out and parameter.requires_grad)
    return FSDPTurboPlan(experts, tuple(units), summed, frozenset(ignored))


def _matches(fqn: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _carrier(modules: dict[str, nn.Module], experts: str, hook_modules: Sequence[str]) -> str:
    """The outermost module around the experts that a pattern names and that is called; without one they themselves."""
    steps = experts.split(".")
    around = [".".join(steps[: depth + 1]) for depth in range(len(steps))]
    return next((fqn for fqn in around if _is_carrier(modules, fqn, hook_modules)), experts)


def _is_carrier(modules: dict[str, nn.Module], fqn: str, hook_modules: Sequence[str]) -> bool:
    return _matches(fqn, hook_modules) and not isinstance(modules[fqn], nn.ModuleDict | nn.ModuleList)


def _choose_dim(weight: Tensor, efsdp_size: int) -> int | None:
    """A dim of each matrix that splits evenly, rows before columns; the dim of the experts is ep's."""
    return next((dim for dim in (1, 2) if weight.shape[dim] % efsdp_size == 0), None)


def _unsplittable(fqn: str, weight: Tensor, efsdp_size: int) -> Fault:
    rule = f"splits matrices evenly, and no size of {fqn}, {tuple(weight.shape[1:])}, divides by efsdp = {efsdp_size}"
    return Fault("dist_config.fsdp_implementation", "custom", rule, "use native, which pads")


def _find_unmatched(modules: dict[str, nn.Module], config: DistConfig) -> Iterator[Fault]:
    for key in ("fsdp_ignored_modules", "hook_modules"):
        for pattern in getattr(config, key):
            if not any(fqn and fnmatchcase(fqn, pattern) for fqn in modules):
                rule = "must match a module of the model"
                yield Fault(f"dist_config.{key}", pattern, rule, suggest_fqns(pattern, [fqn for fqn in modules if fqn]))


def _find_idle_hooks(modules: dict[str, nn.Module], experts: Sequence[str], config: DistConfig) -> Iterator[Fault]:
    for pattern in config.hook_modules:
        matched = [fqn for fqn in modules if fqn and _is_carrier(modules, fqn, [pattern])]
        if any(fqn and fnmatchcase(fqn, pattern) for fqn in modules) and not any(
            f"{expert}.".startswith(f"{fqn}.") for fqn in matched for expert in experts
        ):
            rule = "must match modules that are called and hold experts, or are them"
            yield Fault("dist_config.hook_modules", pattern, rule, f"name {experts[0] if experts else 'none'} or above")
