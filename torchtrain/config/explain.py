"""Say in the user's words what pydantic found wrong with one value."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ruamel.yaml.error import YAMLError

from torchtrain.config.files import parse_yaml
from torchtrain.config.nearest import nearest_name, nearest_path
from torchtrain.config.removed import explain_removed
from torchtrain.config.schema import Key, job_keys, pattern_of
from torchtrain.errors import Fault

_RULES = {
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of keys to values",
    "dataclass_type": "must be a mapping of keys to values",
    "too_long": "has too many elements",
}

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def explain(detail: Any) -> Fault:
    """Turn one entry of pydantic's ``ValidationError.errors()`` into a fault."""
    kind, value = detail["type"], detail["input"]
    path = ".".join(map(str, detail["loc"]))
    if kind == "unexpected_keyword_argument":
        return _explain_unknown(path, value)
    if kind == "missing":
        return _explain_missing(detail)
    key = job_keys().get(pattern_of(path))
    if kind == "literal_error":
        names = [name.strip(" '") for name in detail["ctx"]["expected"].replace(" or ", ", ").split(",")]
        return Fault(path, value, f"must be one of {', '.join(names)}{_or_null(key)}", _choose(value, names))
    return Fault(path, value, f"{_RULES.get(kind, detail['msg'])}{_or_null(key)}", _fix(kind, value, key))


def _explain_unknown(path: str, value: object) -> Fault:
    removed = explain_removed(path)
    if removed is not None:
        return Fault(path, value, removed.why, removed.instead)
    known = nearest_path(pattern_of(path), job_keys())
    if known is not None and "*" in known and pattern_of(path).rpartition(".")[0] == known.rpartition(".")[0]:
        known = f"{path.rpartition('.')[0]}.{known.rpartition('.')[2]}"  # the same list element, by its index
    guess = f"did you mean {known}?" if known else "remove it; docs/config_reference.md lists every key"
    return Fault(path, value, "is not a key of the job", guess)


def _explain_missing(detail: Any) -> Fault:
    *parents, last = detail["loc"]
    if isinstance(last, int):
        return Fault(".".join(map(str, parents)), detail["input"], "has too few elements", "give every element")
    return Fault(".".join(map(str, detail["loc"])), None, "is required", "add it")


def _choose(value: object, names: list[str]) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and all(map(str.isdecimal, names)):
        sizes = sorted(map(int, names))
        below, above = [size for size in sizes if size < value][-1:], [size for size in sizes if size > value][:1]
        return f"use {' or '.join(map(str, (*below, *above)))}"
    if not isinstance(value, str):
        return f"use for example {names[0]}"
    nearest = _SHORT_DTYPES.get(value) or nearest_name(value, names)
    return f'did you mean "{nearest}"?' if nearest in names else f"use for example {names[0]}"


def _or_null(key: Key | None) -> str:
    return " or null" if key is not None and key.is_nullable else ""


def _fix(kind: str, value: object, key: Key | None) -> str:
    if key is not None and key.path == "checkpoint.resume" and isinstance(value, bool):
        return f"write {'auto' if value else 'null'}"
    if kind == "dataclass_type":
        return "write its keys below it, or leave it out to take every default"
    if kind == "tuple_type":
        return "write it in brackets, [a, b], or one element per line after a dash"
    if isinstance(value, float) and value.is_integer() and kind.startswith("int"):
        return f"write {int(value)}"
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f'quote it: "{json.dumps(value)}" in the file, \'"{json.dumps(value)}"\' on the command line'
    if kind == "string_type" and isinstance(value, dict):
        return 'quote it, since a colon and a space make a mapping: "..." in the file, \'"..."\' on the command line'
    if isinstance(value, str) and _reads_as_another_type(value):
        return f"write {value} without quotes"
    return f"write one{_default_hint(key)}"


def _reads_as_another_type(text: str) -> bool:
    try:
        return isinstance(parse_yaml(text), bool | int | float)
    except YAMLError:
        return False


def _default_hint(key: Key | None) -> str:
    if key is None or key.default is dataclasses.MISSING:
        return ""
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    return f", such as the default {json.dumps(default, default=str)}"
