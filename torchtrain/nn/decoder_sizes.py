"""What every decoder's sizes must satisfy, and what they cost: shared by the families' ``architecture`` files.

Imports no torch: a job is checked before that is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from torchtrain.errors import Fault


class AttentionSizes(Protocol):
    """The sizes that every family has."""

    @property
    def hidden_size(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def head_dim(self) -> int: ...  # noqa: D102


DECODER_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
DECODER_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range")


def architecture_fault(field: str, value: object, rule: str, fix: str) -> Fault:
    """Make a fault of a field of the architecture; its path is that of the job file."""
    return Fault(path=f"model.overrides.{field}", value=value, rule=rule, fix=fix)


def find_sign_faults(
    architecture: object, *, counts: Iterable[str] = DECODER_COUNTS, numbers: Iterable[str] = DECODER_NUMBERS
) -> Iterator[Fault]:
    """Demand that counts are at least 1 and numbers above 0 and finite."""
    for field in counts:
        if getattr(architecture, field) < 1:
            yield architecture_fault(field, getattr(architecture, field), "must be at least 1", "use a positive number")
    for field in numbers:
        value = getattr(architecture, field)
        if not (value > 0 and math.isfinite(value)):
            yield architecture_fault(field, value, "must be above 0 and finite", "use a positive number")


def find_attention_faults(architecture: AttentionSizes) -> Iterator[Fault]:
    """Demand heads that share keys evenly and can be rotated in pairs."""
    heads, groups = architecture.num_attention_heads, architecture.num_key_value_heads
    if heads >= 1 and groups >= 1 and heads % groups:
        legal = ", ".join(str(size) for size in range(1, heads + 1) if heads % size == 0)
        rule = f"must divide num_attention_heads = {heads}"
        yield architecture_fault("num_key_value_heads", groups, rule, f"use one of {legal}")
    if architecture.head_dim >= 1 and architecture.head_dim % 2:
        rule = "must be even, because rotary positions turn pairs of values"
        yield architecture_fault("head_dim", architecture.head_dim, rule, f"use {architecture.head_dim + 1}")


def count_attention_parameters(architecture: AttentionSizes) -> int:
    """Count the weights of one layer's four projections."""
    heads_in_and_out = 2 * architecture.num_attention_heads + 2 * architecture.num_key_value_heads
    return architecture.hidden_size * architecture.head_dim * heads_in_and_out


def count_feed_forward_parameters(hidden_size: int, intermediate_size: int) -> int:
    """Count the weights of a SwiGLU layer, or of one expert."""
    return 3 * hidden_size * intermediate_size
