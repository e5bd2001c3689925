"""Job files: YAML 1.2 or TOML in, one plain mapping out, with ``extends`` merged.

Knows nothing about the keys. What cannot be read at all stops here with a `ConfigError`.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from torchtrain.config.nearest import nearest_name
from torchtrain.errors import ConfigError, Fault

Mapping = dict[str, Any]
SUFFIXES = (".yaml", ".yml", ".toml")


def parse_yaml(text: str) -> Any:
    """Parse one YAML 1.2 document into a tree of JSON types.

    Raises:
        YAMLError: Bad syntax, a duplicate key, or something that JSON has not, such as a node that contains itself.
    """
    tree = YAML(typ="safe", pure=True).load(text)
    try:
        return _as_json_tree(tree)
    except (TypeError, ValueError) as error:
        raise YAMLError(str(error)) from None


def _as_json_tree(tree: Any) -> Any:
    """A copy with nothing shared: an override of an anchored node must not change its aliases. Dates become text."""
    return json.loads(json.dumps(tree, default=str))


def read_mapping(path: Path, *, named_by: str = "job file", extended_from: tuple[Path, ...] = ()) -> Mapping:
    """Read a job file, or another file of keys, and whatever it extends.

    Args:
        path: File ending in ``.yaml``, ``.yml`` or ``.toml``.
        named_by: What kind of file it is, for the messages.
        extended_from: Files on the way here, to notice a cycle.

    Returns:
        The merged mapping, without ``extends``.

    Raises:
        ConfigError: A file that is missing, empty, malformed, or extends itself.
    """
    mapping = _parse_file(path, named_by=named_by if not extended_from else f"extends in {extended_from[-1]}")
    if "extends" not in mapping:
        return mapping
    base_name = mapping.pop("extends")
    if not isinstance(base_name, str) or not base_name:
        _refuse("extends", base_name, "must name one job file", f"write a path relative to {path}")
    base = path.parent / base_name
    chain = (*extended_from, path)
    if base.resolve() in {step.resolve() for step in chain}:
        shown = " -> ".join(str(step) for step in (*chain, base))
        _refuse("extends", base_name, f"must not lead back to itself ({shown})", "remove one of these extends")
    return merge(read_mapping(base, extended_from=chain), mapping)


def merge(base: Mapping, changes: Mapping) -> Mapping:
    """Lay one mapping over another: mappings merge key by key, anything else replaces."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _parse_file(path: Path, *, named_by: str) -> Mapping:
    if path.suffix not in SUFFIXES:
        _refuse(named_by, str(path), "must be YAML or TOML", f"give a file that ends in {', '.join(SUFFIXES)}")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        names = [sibling.name for sibling in path.parent.glob("*") if sibling.suffix in SUFFIXES]
        guess = nearest_name(path.name, names)
        _refuse(
            named_by, str(path), "does not exist", f"did you mean {path.parent / guess}?" if guess else "check the path"
        )
    except (OSError, UnicodeDecodeError) as error:
        _refuse(named_by, str(path), f"cannot be read ({error})", "give a readable UTF-8 text file")
    try:
        mapping = _as_json_tree(tomllib.loads(text)) if path.suffix == ".toml" else parse_yaml(text)
    except tomllib.TOMLDecodeError as error:
        _refuse(named_by, str(path), f"is not valid TOML: {error}", "correct the file there")
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        _refuse(named_by, place, f"is not valid YAML: {error.problem or error.context}{where}", _yaml_fix(error))
    except YAMLError as error:
        _refuse(named_by, str(path), f"is not valid YAML: {error}", "correct the file there")
    if mapping is None or mapping == {}:
        fix = "write at least dataset.sources; every other key has a default" if named_by == "job file" else "fill it"
        _refuse(named_by, str(path), "is empty", fix)
    if not isinstance(mapping, dict):
        _refuse(
            named_by,
            str(path),
            f"must be a mapping of sections, not a {type(mapping).__name__}",
            'write "key:" lines',
        )
    return mapping


def _yaml_fix(error: MarkedYAMLError) -> str:
    if "duplicate key" in str(error.problem):
        return "keep one of the two"
    return "check indentation, quotes and the space after each colon there"


def _refuse(path: str, value: object, rule: str, fix: str) -> NoReturn:
    raise ConfigError([Fault(path, value, rule, fix)]) from None
