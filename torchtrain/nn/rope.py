"""Rotary position embedding, as cosines and sines computed from positions once per forward.

There is no buffer: nothing to save, to shard or to materialise, and positions may restart with every document.

Shape legend: B = batch, T = tokens, N = heads, H = head dim, F = H / 2 frequencies.
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

        Pairs are (i, i + H/2), as in Hugging Face's checkpoints; Meta's own pair neighbours and permute q and k rows.

        Source: Su et al. 2021, "RoFormer", equation 34.

        Numerics:
            In fp32, rounded to the input's dtype at the end.
        """
        first_BTNF, second_BTNF = x_BTNH.float().chunk(2, dim=-1)
        turned_first_BTNF = first_BTNF * self.cos_BT1F - second_BTNF * self.sin_BT1F
        turned_second_BTNF = second_BTNF * self.cos_BT1F + first_BTNF * self.sin_BT1F
        return torch.cat((turned_first_BTNF, turned_second_BTNF), dim=-1).to(x_BTNH.dtype)


def build_rotary_table(positions_BT: Tensor, config: RopeConfig) -> RotaryTable:
    """Compute the table for one batch.

    Args:
        positions_BT: int64 positions, each counted from the start of its document.
        config: The angles.
    """
    frequencies_F = _inverse_frequencies(config, positions_BT.device)
    angles_BT1F = positions_BT[:, :, None, None].float() * frequencies_F
    return RotaryTable(angles_BT1F.cos(), angles_BT1F.sin())


def _inverse_frequencies(config: RopeConfig, device: torch.device) -> Tensor:
    exponents_F = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies_F = 1.0 / config.theta**exponents_F
    return frequencies_F if config.scaling is None else _scale_llama3(frequencies_F, config.scaling)


def _scale_llama3(frequencies_F: Tensor, scaling: Llama3Scaling) -> Tensor:
    # How often a frequency turns over the original context decides: above high_freq_factor turns it stays, below
    # low_freq_factor turns it is stretched by the whole factor, and between the two it is a linear blend.
    turns_F = scaling.original_max_position_embeddings * frequencies_F / (2 * math.pi)
    keep_F = (turns_F - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep_F = keep_F.clamp(0.0, 1.0)
    return keep_F * frequencies_F + (1.0 - keep_F) * frequencies_F / scaling.factor
