"""Command-line overrides: ``--a.b.c=value`` and friends, laid over the mapping before it is validated.

So two overrides that are legal only together work, and an override is checked exactly as if the file had said it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ruamel.yaml.error import YAMLError

from torchtrain.config.files import Mapping, parse_yaml
from torchtrain.errors import Fault

EXAMPLE = "write it as --training.steps=100"


def apply_overrides(mapping: Mapping, words: Sequence[str]) -> list[Fault]:
    """Lay overrides over a mapping, in place; a later one wins.

    Args:
        mapping: The merged job file.
        words: Command-line words: ``--a.b=value``, ``--a.b value``, or either without dashes; values are YAML.

    Returns:
        A fault for each word that is no override.
    """
    faults: list[Fault] = []
    for path, text in _pair_words(words):
        fault = _apply_one(mapping, path, text)
        if fault is not None:
            faults.append(fault)
    return faults


def find_override_warnings(words: Sequence[str]) -> list[str]:
    """Name each key that is given several values, and the one that counts."""
    given: dict[str, list[str]] = {}
    for path, text in _pair_words(words):
        if text is not None and text not in given.setdefault(path.removeprefix("--"), []):
            given[path.removeprefix("--")].append(text)
    last = {path.removeprefix("--"): text for path, text in _pair_words(words)}
    return [
        f"{path} is given {' and '.join(texts)} on the command line: the last one counts, {last[path]}"
        for path, texts in given.items()
        if len(texts) > 1
    ]


def _pair_words(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Pair each path with its text; None where the text is missing."""
    position = 0
    while position < len(words):
        path, has_equals, text = words[position].partition("=")
        position += 1
        if has_equals:
            yield path, text
        elif position < len(words) and not words[position].startswith("--"):
            yield path, words[position]
            position += 1
        else:
            yield path, None


def _apply_one(mapping: Mapping, word: str, text: str | None) -> Fault | None:
    path = word.removeprefix("--")
    if not path or path.startswith("-") or not all(path.split(".")):
        return Fault("command line", word, "is not a dotted job key", EXAMPLE)
    if text is None:
        return Fault(
            "command line", word, "has no value", f"write it as --{path}=VALUE (true and false are values too)"
        )
    if not text.strip():
        fix = "write null, or '\"\"' for an empty text"
        if text:
            fix = f"quote blanks and line ends inside the shell's quotes: --{path}='{json.dumps(text)}'"
        return Fault(path, text, "has an empty value on the command line", fix)
    try:
        value = parse_yaml(text)
    except YAMLError:
        return Fault(
            path, text, "must be a YAML value", f"quote it for YAML inside the shell's quotes: --{path}='\"...\"'"
        )
    return _set(mapping, path, value)


def _set(mapping: Mapping, path: str, value: Any) -> Fault | None:
    *parents, name = path.split(".")
    node: Any = mapping
    for depth, step in enumerate(parents):
        if isinstance(node, dict) and node.get(step) is None:
            node[step] = {}
        node = _child(node, step)
        if not isinstance(node, dict | list):
            above = ".".join(parents[: depth + 1])
            return Fault(path, value, f"cannot be set: {above} has no keys or elements", f"give {above} as a whole")
    if isinstance(node, dict):
        node[name] = value
    elif name.isdecimal() and int(name) < len(node):
        node[int(name)] = value
    else:
        return Fault(
            path, value, f"must name an element from 0 to {len(node) - 1}", f"or give {'.'.join(parents)} as a whole"
        )
    return None


def _child(node: Any, step: str) -> Any:
    """One step down a tree of dicts and lists; None where there is nothing."""
    if isinstance(node, dict):
        return node.get(step)
    if isinstance(node, list) and step.isdecimal() and int(step) < len(node):
        return node[int(step)]
    return None
