"""Rotary position embedding, as cosines and sines computed from positions once per forward.

There is no buffer: nothing to save, to shard or to materialise, and positions may restart with every document.

Shape legend: B = batch, T = tokens, N = heads, H = head dim, R = rotated values of a head, F = R / 2 frequencies,
A = position axes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretch low frequencies to a longer context and leave high ones alone.

    Source: Dubey et al. 2024, "The Llama 3 Herd of Models", section 3.4, and the code released with Llama 3.1.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class RopeConfig:
    """The angles of one family member."""

    head_dim: int
    theta: float
    scaling: Llama3Scaling | None = None
    partial_rotary_factor: float = 1.0
    """Share of a head that is rotated, its first values; the rest carries no position."""
    mrope_section: tuple[int, ...] | None = None
    """Where a token has positions on several axes: how many frequencies turn by each. ``None``: there is one axis."""

    @property
    def rotary_dim(self) -> int:
        """Values of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)


class RotaryTable:
    """Cosines and sines of one batch's positions, in fp32.

    Deliberately neither a tuple nor a dataclass: FSDP's ``cast_forward_inputs`` reaches into those, and would
    round to bf16 what has to tell neighbouring positions apart.

    Attributes:
        cos_BT1F, sin_BT1F: fp32, broadcast over heads.
    """

    def __init__(self, cos_BT1F: Tensor, sin_BT1F: Tensor) -> None:
        self.cos_BT1F = cos_BT1F
        self.sin_BT1F = sin_BT1F

    def rotate(self, x_BTNH: Tensor) -> Tensor:
        """Rotate every head by its token's angles.

        Pairs are (i, i + R/2), as in Hugging Face's checkpoints; Meta's own pair neighbours and permute q and k rows.

        Source: Su et al. 2021, "RoFormer", equation 34.

        Numerics:
            In fp32, rounded to the input's dtype at the end.
        """
        rotary_dim = 2 * self.cos_BT1F.shape[-1]
        if x_BTNH.shape[-1] > rotary_dim:
            x_BTNR, rest = x_BTNH.split([rotary_dim, x_BTNH.shape[-1] - rotary_dim], dim=-1)
            return torch.cat((self.rotate(x_BTNR), rest), dim=-1)
        first_BTNF, second_BTNF = x_BTNH.float().chunk(2, dim=-1)
        turned_first_BTNF = first_BTNF * self.cos_BT1F - second_BTNF * self.sin_BT1F
        turned_second_BTNF = second_BTNF * self.cos_BT1F + first_BTNF * self.sin_BT1F
        return torch.cat((turned_first_BTNF, turned_second_BTNF), dim=-1).to(x_BTNH.dtype)


def build_rotary_table(positions: Tensor, config: RopeConfig) -> RotaryTable:
    """Compute the table for one batch.

    Args:
        positions: int64 ``positions_BT``, each counted from the start of its document; or ``positions_ABT`` of several
            axes, for a model with ``mrope_section``. They end here: nothing else is told from them.
        config: The angles.

    Raises:
        ValueError: There are as many axes as the model has no sections for.
    """
    frequencies_F = _inverse_frequencies(config, positions.device)
    if positions.ndim == 2:
        angles_BT1F = positions[:, :, None, None].float() * frequencies_F
    else:
        axes_F = _axis_of_frequency(config, positions).to(positions.device)
        angles_BT1F = positions[axes_F].movedim(0, -1)[:, :, None].float() * frequencies_F
    return RotaryTable(angles_BT1F.cos(), angles_BT1F.sin())


def _axis_of_frequency(config: RopeConfig, positions_ABT: Tensor) -> Tensor:
    """Say by which axis each frequency turns: they take turns until their sections are used up, the first has the rest.

    Source: Qwen Team 2025, "Qwen3-VL Technical Report", interleaved MRoPE.
    """
    sections = config.mrope_section or ()
    if positions_ABT.ndim != 3 or positions_ABT.shape[0] != len(sections):
        raise ValueError(f"positions of shape {tuple(positions_ABT.shape)} do not fit the sections {sections}")
    turn = len(sections)
    axes = [f % turn if f < turn * sections[f % turn] else 0 for f in range(config.rotary_dim // 2)]
    return torch.tensor(axes)


def _inverse_frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    exponents_F = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device) / config.rotary_dim
    frequencies_F = 1.0 / config.theta**exponents_F
    return frequencies_F if config.scaling is None else _scale_llama3(frequencies_F, config.scaling)


def _scale_llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    # How often a frequency turns over the original context decides: above high_freq_factor turns it stays, below
    # low_freq_factor turns it is stretched by the whole factor, and between the two it is a linear blend.
    turns_F = scaling.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    keep_F = (turns_F - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_F = keep_F.clamp(0.0, 1.0)
    return keep_F * frequencies_F + (1.0 - keep_F) * frequencies_F / scaling.factor
