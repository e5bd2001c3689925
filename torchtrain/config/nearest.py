"""Guess what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection


def nearest_name(name: str, names: Collection[str]) -> str | None:
    """The known name most like ``name``, or None where nothing comes close."""
    by_folded = {known.lower().replace("-", "_").strip("_"): known for known in names}
    folded = name.lower().replace("-", "_").strip("_")
    matches = difflib.get_close_matches(folded, by_folded, n=1, cutoff=0.7)
    if matches:
        return by_folded[matches[0]]
    longer = [
        known for known in by_folded if folded and (known.startswith(f"{folded}_") or known.endswith(f"_{folded}"))
    ]
    return by_folded[longer[0]] if len(longer) == 1 else None


def nearest_path(path: str, known_paths: Collection[str]) -> str | None:
    """The known job path that a wrong one was meant to be.

    A name that exists in exactly one other section wins, since a misplaced key is spelt right; then a similar name in
    the same section; then the exact or a similar name anywhere.
    """
    parent, _, name = path.rpartition(".")
    by_name: dict[str, list[str]] = {}
    for known in known_paths:
        by_name.setdefault(known.rpartition(".")[2], []).append(known)
    elsewhere = by_name.get(name, [])
    if len(elsewhere) == 1:
        return elsewhere[0]
    siblings = {known.rpartition(".")[2]: known for known in known_paths if known.rpartition(".")[0] == parent}
    sibling = nearest_name(name, siblings)
    if sibling is not None:
        return siblings[sibling]
    if elsewhere:
        return nearest_name(path, elsewhere) or elsewhere[0]
    similar = nearest_name(name, by_name)
    return by_name[similar][0] if similar is not None else None


def did_you_mean(name: str, names: Collection[str]) -> str:
    """An instruction that names the nearest known name, or lists them all."""
    nearest = nearest_name(name, names)
    if nearest is not None:
        return f'did you mean "{nearest}"?'
    return f"use one of {', '.join(map(str, names))}"


def suggest_fqns(fqn: str, known_fqns: Collection[str]) -> str:
    """An instruction that names the up to three parameters most like a misspelt one, in the model's order."""
    close = difflib.get_close_matches(fqn, known_fqns, n=3, cutoff=0.0)
    return f"the nearest are {', '.join(known for known in known_fqns if known in close)}"
