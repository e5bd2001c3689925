"""From section ``optimizer`` to a live optimizer.

Not for stepping it: clipping, scaling and accumulation belong to the trainer.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtrain.config.nearest import did_you_mean, nearest_name
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.config.optimizers import (
    find_fused_faults,
    find_option_faults,
    find_target_faults,
    find_unusable_faults,
    has_fused_step_on_shards,
)
from torchtrain.errors import ConfigError, Fault
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.optim.muon import Muon
from torchtrain.optim.parameter_groups import (
    MUON_GROUPING_OPTIONS,
    find_muon_faults,
    find_unmatched_patterns,
    group_by_decay,
    group_for_muon,
    names_of_trainable,
    split_by_mesh,
)
from torchtrain.runtime.device import has_fused_adamw

# Fields that are keyword arguments where the class has them. So is ``fused``, but its null is resolved first.
_ARGUMENT_FIELDS = ("lr", "weight_decay", "betas", "eps")
# Options of torch's classes that exclude the fused kernel.
_RIVALS_OF_FUSED = ("foreach", "differentiable")
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(OptimizerConfig)}


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    *,
    device: torch.device,
    trusted_targets: Sequence[str] = (),
    is_stage: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimizer of every trainable parameter, in groups with and without weight decay.

    Args:
        model: The sharded model. A tied parameter is taken once, a frozen one not at all.
        config: Section ``optimizer``. A key that the class does not take is left out while it has its default.
        device: Where the step runs; decides what ``fused: null`` means.
        trusted_targets: Import prefixes that ``_target_`` may name besides ``torch.optim.`` and ``torchtrain.``.
        is_stage: Whether ``model`` is a part of one whose whole `check_optimizer` has seen: patterns may match nothing.

    Raises:
        ConfigError: ``_target_`` is not a trusted optimizer class, a key that was set is not one it takes, a pattern of
            ``no_decay`` that is not a default names no parameter, Muon is left with nothing or with what is no matrix,
            or the class refuses a value.
    """
    optimizer_class = resolve_optimizer_class(config.target, trusted_targets)
    names = _argument_names(optimizer_class)
    trainable = names_of_trainable(model)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in trainable)
    arguments, faults = _choose_arguments(config, names, device, is_sharded=is_sharded)
    # The defaults are for all families, and need not match in each.
    own_patterns = [pattern for pattern in config.no_decay if pattern not in _DEFAULTS["no_decay"]]
    if not is_stage:
        faults += find_unmatched_patterns("optimizer.no_decay", own_patterns, [fqns[0] for fqns in trainable.values()])
    is_muon = issubclass(optimizer_class, Muon)
    grouping = {name: arguments.pop(name, None) for name in MUON_GROUPING_OPTIONS} if is_muon else {}
    if is_muon and not is_stage:
        faults += find_muon_faults(trainable, **grouping, lr=config.lr)
    if faults:
        raise ConfigError(faults)
    groups = group_by_decay(trainable, config.no_decay, has_decay=names is None or "weight_decay" in names)
    if is_muon:
        groups = group_for_muon(groups, trainable, **grouping, lr=config.lr)
    groups = split_by_mesh(groups)
    build = partial(optimizer_class, **arguments)
    try:
        if not config.fp32_main_params:
            return build(groups)
        optimizer = MainParamOptimizer(groups, build)
        optimizer.watch_loads(model)
        return optimizer
    except (TypeError, ValueError) as error:
        fault = Fault("optimizer", config.target, f"refused its arguments: {error}", "change the values that it names")
        raise ConfigError([fault]) from error


def check_optimizer(meta_model: nn.Module, config: OptimizerConfig, *, trusted_targets: Sequence[str] = ()) -> None:
    """Refuse what ``build_optimizer`` would refuse, before anything expensive is done.

    Args:
        meta_model: The model on the meta device, sharded or not.
        config: Section ``optimizer``.
        trusted_targets: As for ``build_optimizer``.

    Raises:
        ConfigError: As ``build_optimizer``.
    """
    on_meta = replace(config, fp32_main_params=False)  # the copies need storage, and decide nothing here
    build_optimizer(meta_model, on_meta, device=torch.device("meta"), trusted_targets=trusted_targets)


def resolve_optimizer_class(target: str, trusted_targets: Sequence[str] = ()) -> type[torch.optim.Optimizer]:
    """Import the class that ``_target_`` names. Nothing is imported before its prefix is known to be trusted.

    Raises:
        ConfigError: The prefix is not trusted, there is no such name, it is not an optimizer class, or one that cannot
            train a sharded model.
    """
    if faults := [*find_target_faults(target, trusted_targets), *find_unusable_faults(target)]:
        raise ConfigError(faults)
    module_name, _, class_name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        fault = Fault("optimizer._target_", target, f"must be importable: {error}", "correct the name or install it")
        raise ConfigError([fault]) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [name for name, value in vars(module).items() if _is_optimizer_class(value)]
        nearest = nearest_name(class_name, known)
        fix = f"did you mean {module_name}.{nearest}?" if nearest else "name a subclass of torch.optim.Optimizer"
        raise ConfigError([Fault("optimizer._target_", target, "must name an optimizer class", fix)])
    return found


def _is_optimizer_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer


def _argument_names(optimizer_class: type[torch.optim.Optimizer]) -> tuple[str, ...] | None:
    """List the keyword arguments that a class takes; ``None`` where it takes any (``**kwargs``)."""
    parameters = list(inspect.signature(optimizer_class).parameters.values())[1:]
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    names = tuple(parameter.name for parameter in parameters)
    return (*names, *MUON_GROUPING_OPTIONS) if issubclass(optimizer_class, Muon) else names


def _choose_arguments(
    config: OptimizerConfig, names: tuple[str, ...] | None, device: torch.device, *, is_sharded: bool
) -> tuple[dict[str, Any], list[Fault]]:
    arguments: dict[str, Any] = {}
    faults: list[Fault] = []
    for name in (*_ARGUMENT_FIELDS, "fused"):
        value = getattr(config, name)
        if name == "fused" and value is None:
            if not (names and "fused" in names and config.target.startswith(("torch.optim.", "torchtrain."))):
                continue
            has_rival = any(config.options.get(rival) for rival in _RIVALS_OF_FUSED)
            has_kernel = has_fused_adamw(device) and (not is_sharded or has_fused_step_on_shards(config.target))
            value = has_kernel and not has_rival
        if names is None or name in names:
            arguments[name] = value
        elif value != _DEFAULTS[name]:
            fix = f"remove it; the class takes {', '.join(names)}"
            faults.append(Fault(f"optimizer.{name}", value, f"is not an argument of {config.target}", fix))
    if device.type == "meta" and "fused" in arguments:
        arguments["fused"] = False  # only an optimizer that will step needs the kernel
    for name, value in config.options.items():
        if names is None or name in names:
            arguments[name] = value
        elif name not in _DEFAULTS and name != "params":
            rule, fix = f"is not an argument of {config.target}", did_you_mean(name, names)
            faults.append(Fault(f"optimizer.options.{name}", value, rule, fix))
    if is_sharded:
        faults += find_fused_faults(config)
    return arguments, [*faults, *find_option_faults(config)]
