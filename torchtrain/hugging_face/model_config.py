"""``config.json`` to and from a family's architecture: same words, other defaults, two spellings of rotary settings.

Compares and converts mappings; reading and writing the file stands in ``torchtrain.checkpoint``. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtrain.errors import Fault

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OVERRIDES = "model.overrides."
_MANY = 3
"""Fields that differ, from which on another preset is more likely meant than overrides."""
_OF_THE_WEIGHTS = ("tie_word_embeddings", "quantization_config")
_ROPE_FIELDS = ("partial_rotary_factor", "mrope_section")
"""What families that have them keep among the rotary settings, and what is no scaling."""
_ROPE_WORDS = ("rope_type", "type", "rope_theta", "mrope_interleaved", *_ROPE_FIELDS)


def _as_they_are(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


@dataclass(frozen=True)
class ConfigFormat:
    """What a family's ``config.json`` is, beyond fields that both sides call alike."""

    model_type: str
    class_name: str
    """For ``architectures``, which ``AutoModelForCausalLM`` goes by."""
    defaults: Mapping[str, Any]
    """What Hugging Face assumes of a field that the file leaves out."""
    multimodal_type: str | None = None
    """``model_type`` of files that hold this config as ``text_config``, the language model of a multimodal one."""
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that are no field here, with the values that mean what is computed here; left out, the first is meant."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another version's word for a field, to the field; files are written with both."""
    written: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are no field here and that the file must have."""
    only_here: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that Hugging Face lacks, with the values that it can express; empty where the forward does not ask."""
    training: Collection[str] = ()
    """Fields that are no part of the function: differences are told, not refused."""
    resolve: Callable[[dict[str, Any]], dict[str, Any]] = _as_they_are
    """Brings fields that say one thing in several ways into one of them, which is what is written."""


@dataclass(frozen=True)
class ConfigComparison:
    """A ``config.json`` held against an architecture."""

    faults: tuple[Fault, ...]
    """Differences that nobody asked for."""
    notes: tuple[str, ...]
    """Differences that the job's overrides ask for, or that change nothing about the forward."""


def compare_config(
    config: Mapping[str, Any],
    architecture: Any,
    config_format: ConfigFormat,
    *,
    overridden: Collection[str],
    where: str,
    preset: str | None = None,
    presets: Mapping[str, Any] | None = None,
) -> ConfigComparison:
    """List every difference between a ``config.json`` and the architecture of a job, by field.

    Args:
        config: The file's content.
        architecture: Preset and overrides.
        config_format: The family's.
        overridden: Fields that the job's ``model.overrides`` names.
        where: The file, for messages.
        preset: ``model.preset`` of the job.
        presets: The family's: one that fits is named first, and that none does where much differs.
    """
    config = text_side(config, config_format)
    model_type = config.get("model_type")
    if model_type != config_format.model_type:
        rule = f"must name the family of {where}, whose model_type is {model_type!r}"
        return ConfigComparison((Fault("model.name", config_format.model_type, rule, "use that family's preset"),), ())
    faults = list(_find_foreign(config, config_format, where))
    notes = []
    theirs = config_format.resolve(read_fields(config, config_format))
    ours = config_format.resolve(_plain(asdict(architecture)))
    for name in sorted(ours.keys() | {"rope_scaling"}):
        if name in config_format.only_here:
            continue
        here, there = ours.get(name), theirs.get(name)
        if here == there:
            continue
        if name in overridden or name in config_format.training:
            notes.append(f"{name} is {here} in the job and {there} in {where}")
        elif name not in ours:
            rule = f"must be null, which {name} in {where} is not: the family {config_format.model_type} has none here"
            faults.append(Fault(f"{where}: {name}", there, rule, "use other weights"))
        else:
            rule = f"must be {there}, as in {where}"
            fix = f"set model.overrides.{name} to {there}, or to {here} if the difference is meant"
            faults.append(Fault(f"{_OVERRIDES}{name}", here, rule, fix))
    sizes = [fault for fault in faults if fault.path.startswith(_OVERRIDES)]
    if sizes and presets:
        fitting = [
            name
            for name, candidate in presets.items()
            if name != preset and not _differs(config, candidate, config_format, overridden)
        ]
        if fitting or len(sizes) >= _MANY:
            rule = f"must be of the weights' sizes: {len(sizes)} differ from {where}"
            fix = "no preset has them: set each as below"
            if fitting:
                fix = f"set model.preset: {' or '.join(fitting)}, which has them all and mends what follows"
            faults.insert(0, Fault("model.preset", preset, rule, fix))
    return ConfigComparison(tuple(faults), tuple(notes))


def _differs(
    config: Mapping[str, Any], candidate: Any, config_format: ConfigFormat, overridden: Collection[str]
) -> bool:
    comparison = compare_config(config, candidate, config_format, overridden=overridden, where="")
    return any(fault.path.startswith(_OVERRIDES) for fault in comparison.faults)


def text_side(config: Mapping[str, Any], config_format: ConfigFormat) -> Mapping[str, Any]:
    """Take the part of a multimodal ``config.json`` that is about the language model; any other is returned as it is.

    The outer class made the weights, so what it says of them goes first.
    """
    if config_format.multimodal_type is None or config.get("model_type") != config_format.multimodal_type:
        return config
    outer = {name: config[name] for name in _OF_THE_WEIGHTS if name in config}
    return {"model_type": config_format.model_type, **(config.get("text_config") or {}), **outer}


def read_fields(config: Mapping[str, Any], config_format: ConfigFormat) -> dict[str, Any]:
    """Read a ``config.json`` as architecture fields: defaults filled in, rotary settings in one spelling."""
    config = text_side(config, config_format)
    fields = {**config_format.defaults, **{name: value for name, value in config.items() if value is not None}}
    for alias, name in config_format.aliases.items():
        if alias in fields:
            fields.setdefault(name, fields[alias])
    fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
    if not fields.get("head_dim") and fields.get("num_attention_heads"):
        fields["head_dim"] = fields.get("hidden_size", 0) // fields["num_attention_heads"]
    rope = _read_rope(config)
    fields["rope_theta"] = rope.get("rope_theta", fields.get("rope_theta"))
    fields |= {name: rope[name] for name in _ROPE_FIELDS if name in rope}
    kind = rope.get("rope_type", rope.get("type", "default"))
    rest = {name: value for name, value in rope.items() if name not in _ROPE_WORDS}
    fields["rope_scaling"] = None if kind == "default" else {"rope_type": kind, **rest}
    return fields


def _read_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # Files may have both; Hugging Face takes the older word first, by which people switch YaRN on.
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope:
            return rope if isinstance(rope, Mapping) else {"rope_type": repr(rope)}
    return {}


def read_overrides(config: Mapping[str, Any], config_format: ConfigFormat, known: Collection[str]) -> dict[str, Any]:
    """Say what a ``config.json`` says as a job's ``model.overrides``, whatever the preset.

    Args:
        config: The file's content.
        config_format: The family's.
        known: Fields of the family's architecture.
    """
    fields = read_fields(config, config_format)
    return {name: value for name, value in fields.items() if name in known and value is not None}


def write_config(
    architecture: Any, config_format: ConfigFormat, *, dtype: str, source: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write an architecture as the content of a ``config.json``, readable by old and new versions.

    Args:
        architecture: Of the weights.
        config_format: The family's.
        dtype: Storage dtype of the weights, as in ``bfloat16``.
        source: The file that the weights once came with, whose token ids are kept.
    """
    fields = config_format.resolve(_plain(asdict(architecture)))
    rope_scaling = fields.pop("rope_scaling", None)
    rope = {"rope_theta": fields["rope_theta"], "rope_type": "default", **(rope_scaling or {})}
    rope |= {name: fields[name] for name in _ROPE_FIELDS if name in fields}
    tokens = {} if source is None else text_side(source, config_format)
    kept = {name: tokens[name] for name in _TOKENS if name in tokens}
    return {
        "architectures": [config_format.class_name],
        "model_type": config_format.model_type,
        **{name: value for name, value in fields.items() if name not in config_format.only_here},
        **{alias: fields[name] for alias, name in config_format.aliases.items()},
        "rope_scaling": rope_scaling,
        "rope_parameters": rope,
        **config_format.written,
        **kept,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def find_export_faults(architecture: Any, config_format: ConfigFormat) -> list[Fault]:
    """List what a model has that a ``config.json`` of its family cannot say."""
    faults = []
    for name, allowed in config_format.only_here.items():
        value = getattr(architecture, name)
        if allowed and value not in allowed:
            rule = (
                f"must be {_listed(allowed)} to be exported: Hugging Face's {config_format.model_type} has no such part"
            )
            faults.append(
                Fault(f"model.overrides.{name}", value, rule, "set checkpoint.export_hf to false, or do without")
            )
    return faults


def _find_foreign(config: Mapping[str, Any], config_format: ConfigFormat, where: str) -> Iterator[Fault]:
    fixed = {**config_format.fixed, "quantization_config": (None,)}
    for name, allowed in fixed.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            rule = f"must be {_listed(allowed)}, because nothing else is computed here"
            yield Fault(f"{where}: {name}", value, rule, "use other weights")


def _listed(values: tuple[Any, ...]) -> str:
    return " or ".join("null" if value is None else str(value) for value in values)


def _plain(value: Any) -> Any:
    """As JSON would give it back."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, tuple) else value
