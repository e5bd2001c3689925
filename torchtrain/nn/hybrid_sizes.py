"""Sizes of decoders that mix tokens by gated delta nets and, every few layers, by gated attention. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section
from torchtrain.errors import Fault
from torchtrain.nn.decoder_sizes import (
    architecture_fault,
    count_attention_parameters,
    find_attention_faults,
    find_sign_faults,
)

LayerType = Literal["linear_attention", "full_attention"]


@dataclass(frozen=True, kw_only=True)
class HybridSizes(Section):
    """All of such a decoder but its feed-forward layers, in Hugging Face's words; a family adds those."""

    vocab_size: int = 248_320
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[LayerType, ...] | None = None
    """Of every layer; null: each ``full_attention_interval``-th attends, the others are delta nets."""
    full_attention_interval: int = 4
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, ...] = (11, 11, 10)
    """Frequencies that turn by each of a token's positions, where it has several; text has one."""
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 262_144
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000_000.0
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def attends(self, layer: int) -> bool:
        """Say whether a layer, counted from 0, has full attention; the others are gated delta nets."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "full_attention"
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def num_full_attention_layers(self) -> int:
        """Layers with full attention."""
        return sum(self.attends(layer) for layer in range(self.num_hidden_layers))

    @property
    def num_mixer_parameters(self) -> int:
        """Weights of all layers' projections around attention and delta rule; see ``nn.flops``."""
        gate = self.hidden_size * self.num_attention_heads * self.head_dim
        attention = count_attention_parameters(self) + gate
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        key_size, value_size = keys * self.linear_key_head_dim, values * self.linear_value_head_dim
        delta_net = self.hidden_size * (2 * key_size + 3 * value_size + 2 * values)
        num_attention = self.num_full_attention_layers
        return num_attention * attention + (self.num_hidden_layers - num_attention) * delta_net


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "full_attention_interval",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)


def find_hybrid_faults(sizes: HybridSizes, *, more_counts: Iterable[str]) -> Iterator[Fault]:
    """List what makes these sizes impossible.

    Args:
        sizes: A family's architecture.
        more_counts: The family's own fields that must be at least 1.
    """
    yield from find_sign_faults(sizes, counts=(*_COUNTS, *more_counts))
    yield from find_attention_faults(sizes)
    yield from _rotary_faults(sizes)
    yield from _delta_net_faults(sizes)
    yield from _layer_faults(sizes)


def _rotary_faults(sizes: HybridSizes) -> Iterator[Fault]:
    factor, head_dim = sizes.partial_rotary_factor, sizes.head_dim
    if not 0 < factor <= 1 or int(head_dim * factor) < 2 or int(head_dim * factor) % 2:
        rule = f"must make an even number of at least 2 values of head_dim = {head_dim} turn"
        yield architecture_fault("partial_rotary_factor", factor, rule, "use 1.0, 0.5 or 0.25")
    elif sum(sizes.mrope_section) != int(head_dim * factor) // 2:
        rule = (
            f"must add up to the {int(head_dim * factor) // 2} frequencies that head_dim x partial_rotary_factor make"
        )
        yield architecture_fault("mrope_section", list(sizes.mrope_section), rule, "as in [11, 11, 10] for 32")


def _delta_net_faults(sizes: HybridSizes) -> Iterator[Fault]:
    keys, values = sizes.linear_num_key_heads, sizes.linear_num_value_heads
    if keys >= 1 and values >= 1 and values % keys:
        rule = f"must be a multiple of linear_num_key_heads = {keys}"
        fix = f"use {max(1, values // keys) * keys}"
        yield architecture_fault("linear_num_value_heads", values, rule, fix)


def _layer_faults(sizes: HybridSizes) -> Iterator[Fault]:
    types, layers = sizes.layer_types, sizes.num_hidden_layers
    if types is not None and len(types) != layers and layers >= 1:
        rule = f"must name the type of each of num_hidden_layers = {layers} layers, not of {len(types)}"
        yield architecture_fault("layer_types", list(types), rule, "use null and set full_attention_interval")
