"""Finds families and resolves their architectures. Imports no torch until a spec is asked for.

A family is a folder of four files: ``architecture`` (``PRESETS``, ``UNSUPPORTED``, ``find_architecture_faults``, and
``FSDPTURBO`` for that plugin; no torch), ``model``, ``parallelize`` and ``spec`` (``SPEC``).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import TypeAdapter, ValidationError

from torchtrain.config.explain import explain
from torchtrain.config.nearest import did_you_mean
from torchtrain.distributed.fsdpturbo.legality import FSDPTurboModel
from torchtrain.distributed.legality import DecoderSizes, Technique
from torchtrain.errors import ConfigError, Fault

if TYPE_CHECKING:
    from torchtrain.model_spec import ModelSpec

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


class Architecture(DecoderSizes, Protocol):
    """What every family's architecture offers to code that does not know the family."""

    @property
    def max_position_embeddings(self) -> int:
        """Longest sequence the rotary positions are meant for."""
        ...


def load_spec(name: str) -> ModelSpec:
    """Import a family's spec.

    Raises:
        ConfigError: There is no such family.
    """
    _refuse(_family_faults(name))
    return importlib.import_module(f"models.{name}.spec").SPEC


def resolve_architecture(name: str, preset: str, overrides: Mapping[str, Any]) -> Architecture:
    """Apply section ``model``'s overrides to a preset and check the result.

    A mapping given for a nested field changes the keys it names and keeps the rest.

    Raises:
        ConfigError: Family, preset or a field is unknown, or a value has the wrong type or fits no other; all at once.
    """
    _refuse(_family_faults(name))
    family = importlib.import_module(f"models.{name}.architecture")
    if preset not in family.PRESETS:
        fix = did_you_mean(preset, family.PRESETS)
        raise ConfigError([Fault(path="model.preset", value=preset, rule=f"must name a size of {name}", fix=fix)])
    base = family.PRESETS[preset]
    faults = _override_faults(family, base, overrides)
    bad_fields = {fault.path.split(".")[2] for fault in faults}
    sound = {field: value for field, value in overrides.items() if field not in bad_fields}
    architecture = _apply(base, sound)
    _refuse([*faults, *family.find_architecture_faults(architecture)])
    return architecture


def unsupported_techniques(name: str) -> Mapping[Technique, str]:
    """Say which parallel techniques a family cannot do, each with the reason."""
    return importlib.import_module(f"models.{name}.architecture").UNSUPPORTED


def fsdpturbo_models() -> dict[str, FSDPTurboModel]:
    """Say what each family registered with the plugin fsdpturbo; those that did not are left out."""
    architectures = {name: importlib.import_module(f"models.{name}.architecture") for name in FAMILIES}
    return {name: module.FSDPTURBO for name, module in architectures.items() if hasattr(module, "FSDPTURBO")}


def _override_faults(family: ModuleType, base: Any, overrides: Mapping[str, Any]) -> list[Fault]:
    known = [field.name for field in fields(base)]
    rule = "must name a field of the architecture"
    faults = [
        Fault(path=f"model.overrides.{field}", value=value, rule=rule, fix=did_you_mean(field, known))
        for field, value in overrides.items()
        if field not in known
    ]
    try:
        _apply(base, {field: value for field, value in overrides.items() if field in known})
    except ValidationError as error:
        faults.extend(_explain_invalid(detail) for detail in error.errors(include_url=False))
    return faults


def _explain_invalid(detail: Any) -> Fault:
    location = ("model", "overrides", *detail["loc"])
    if detail["type"] == "unexpected_keyword_argument":
        return Fault(path=".".join(location), value=detail["input"], rule="is no key of this field", fix="remove it")
    return explain({**detail, "loc": location})


def _apply(base: Any, overrides: Mapping[str, Any]) -> Any:
    values = asdict(base)
    for field, value in overrides.items():
        is_nested = isinstance(values[field], dict) and isinstance(value, Mapping)
        values[field] = {**values[field], **value} if is_nested else value
    # Through JSON, where strict mode takes an integer for a float and a mapping for a dataclass, and nothing else.
    return TypeAdapter(type(base)).validate_json(json.dumps(values))


def _family_faults(name: str) -> list[Fault]:
    if name in FAMILIES:
        return []
    rule = "must name a model family"
    return [Fault(path="model.name", value=name, rule=rule, fix=did_you_mean(name, FAMILIES))]


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise ConfigError(faults)
