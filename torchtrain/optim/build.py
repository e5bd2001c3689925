"""From section ``optimizer`` to a live optimizer.

Not for stepping it: clipping, scaling and accumulation belong to the trainer.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchtrain.config.nearest import did_you_mean, nearest_name
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.errors import ConfigError, Fault
from torchtrain.runtime.device import has_fused_adamw

_OWN_PREFIXES = ("torch.optim", "torchtrain")
# Fields that are keyword arguments where the class has them. So is ``fused``, but its null is resolved first.
_ARGUMENT_FIELDS = ("lr", "weight_decay", "betas", "eps")
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(OptimizerConfig)}


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, *, device: torch.device, trusted_targets: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """Build the optimizer of every trainable parameter, in groups with and without weight decay.

    Args:
        model: The sharded model. A tied parameter is taken once, a frozen one not at all.
        config: Section ``optimizer``. A key that the class does not take is left out while it has its default.
        device: Where the step runs; decides what ``fused: null`` means.
        trusted_targets: Import prefixes that ``_target_`` may name besides ``torch.optim.`` and ``torchtrain.``.

    Raises:
        ConfigError: ``_target_`` is not a trusted optimizer class, a key that was set is not one it takes, a pattern of
            ``no_decay`` that is not a default names no parameter, or the class refuses a value.
    """
    optimizer_class = resolve_optimizer_class(config.target, trusted_targets)
    names = _argument_names(optimizer_class)
    arguments, faults = _choose_arguments(config, names, device)
    groups = _group_parameters(model, config.no_decay)
    faults += _find_unmatched_patterns(model, config.no_decay)
    if faults:
        raise ConfigError(faults)
    if names is None or "weight_decay" in names:
        groups["no_decay"]["weight_decay"] = 0.0
    try:
        # An empty group is legal for torch, but cannot be told from another empty group in a checkpoint.
        return optimizer_class([group for group in groups.values() if group["params"]], **arguments)
    except (TypeError, ValueError) as error:
        fault = Fault("optimizer", config.target, f"refused its arguments: {error}", "change the values that it names")
        raise ConfigError([fault]) from error


def resolve_optimizer_class(target: str, trusted_targets: Sequence[str] = ()) -> type[torch.optim.Optimizer]:
    """Import the class that ``_target_`` names. Nothing is imported before its prefix is known to be trusted.

    Raises:
        ConfigError: The prefix is not trusted, there is no such name, or it is not an optimizer class.
    """
    prefixes = (*_OWN_PREFIXES, *trusted_targets)
    if not any(target.startswith(f"{prefix.rstrip('.')}.") for prefix in prefixes):
        rule = "must be a class under torch.optim. or torchtrain."
        raise ConfigError(
            [Fault("optimizer._target_", target, rule, "name one, or list its import prefix in trusted_targets")]
        )
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
    return tuple(parameter.name for parameter in parameters)


def _choose_arguments(
    config: OptimizerConfig, names: tuple[str, ...] | None, device: torch.device
) -> tuple[dict[str, Any], list[Fault]]:
    arguments: dict[str, Any] = {}
    faults: list[Fault] = []
    for name in (*_ARGUMENT_FIELDS, "fused"):
        value = getattr(config, name)
        if name == "fused" and value is None:
            if not (names and "fused" in names and config.target.startswith("torch.optim.")):
                continue
            value = has_fused_adamw(device)
        if names is None or name in names:
            arguments[name] = value
        elif value != _DEFAULTS[name]:
            fix = f"remove it; the class takes {', '.join(names)}"
            faults.append(Fault(f"optimizer.{name}", value, f"is not an argument of {config.target}", fix))
    for name, value in config.options.items():
        if name in _DEFAULTS:
            rule, fix = "has a key of its own", f"set optimizer.{name} instead"
        elif names is not None and name not in names:
            rule, fix = f"is not an argument of {config.target}", did_you_mean(name, names)
        else:
            arguments[name] = value
            continue
        faults.append(Fault(f"optimizer.options.{name}", value, rule, fix))
    return arguments, faults


def _trainable_parameters(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    # named_parameters yields a tied parameter once, under its first name.
    return ((fqn, parameter) for fqn, parameter in model.named_parameters() if parameter.requires_grad)


def _group_parameters(model: nn.Module, no_decay: Sequence[str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {"decay": {"params": []}, "no_decay": {"params": []}}
    for fqn, parameter in _trainable_parameters(model):
        is_exempt = any(fnmatchcase(fqn, pattern) for pattern in no_decay)
        groups["no_decay" if is_exempt else "decay"]["params"].append(parameter)
    return groups


def _find_unmatched_patterns(model: nn.Module, no_decay: Sequence[str]) -> list[Fault]:
    """Find patterns that a user wrote for nothing; the defaults are for all families, and need not match in each."""
    fqns = [fqn for fqn, _ in _trainable_parameters(model)]
    faults = []
    for pattern in no_decay:
        if pattern not in _DEFAULTS["no_decay"] and not any(fnmatchcase(fqn, pattern) for fqn in fqns):
            nearest = nearest_name(pattern, fqns)
            fix = f"did you mean {nearest}?" if nearest else "correct or remove it"
            faults.append(Fault("optimizer.no_decay", pattern, "must match a trainable parameter", fix))
    return faults
