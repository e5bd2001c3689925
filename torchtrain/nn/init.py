"""Draw initial values so that every topology starts from the same weights.

A parameter is drawn from its own name, never from a shared stream: neither the order in which layers are built nor the
rank that holds a row changes its values. *How* a parameter is drawn is a family's ``init_rule``, of which the usual one
stands here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchtrain.runtime.seed import derive_seed

# Fixed for ever: another size is another initialisation. Small enough that a rank wastes little at the edges of its
# rows, large enough that seeding a generator (microseconds) does not show.
BLOCK_NUMEL = 2**16


@dataclass(frozen=True)
class Normal:
    """Independent draws from a normal distribution around zero."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One value everywhere."""

    value: float


@dataclass(frozen=True)
class LogUniform:
    """The logarithms of independent draws between two bounds, all equally likely."""

    low: float
    high: float


InitRule = Normal | Constant | LogUniform


def decoder_init_rule(fqn: str, *, initializer_range: float, num_hidden_layers: int) -> InitRule:
    """Say how a parameter of a decoder is drawn.

    Matrices, stacks of experts and embeddings are normal with ``initializer_range``; the projections that write into
    the residual stream (attention output, feed-forward down) are smaller by ``sqrt(2 * num_hidden_layers)``, so that
    the stream's variance at the last block does not grow with depth. Norms start at one, biases at zero.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    """
    if fqn.endswith("norm.weight"):
        return Constant(1.0)
    if fqn.endswith(".bias"):
        return Constant(0.0)
    if fqn.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        return Normal(initializer_range / (2 * num_hidden_layers) ** 0.5)
    return Normal(initializer_range)


def draw_rows(rule: InitRule, *, seed: int, fqn: str, shape: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Draw rows ``[start, stop)`` of dim 0 of a parameter's initial value.

    The rows are cut into blocks whose size depends on the shape alone, each drawn by a generator of its own, so a rank
    draws the blocks it touches and no others, and gets what any other split would have given it.

    Args:
        rule: How the parameter is drawn.
        seed: The run's seed.
        fqn: The parameter's full name, which is part of its seed.
        shape: Global shape, at least one dim.
        start: First row.
        stop: One past the last row.

    Returns:
        fp32 CPU tensor of shape ``(stop - start, *shape[1:])``.

    Numerics:
        NumPy's PCG64, because torch's CPU generator keeps only the low 32 bits of its seed (two of the million blocks
        of a large model would then be equal) and its vectorised ``normal_`` may differ between processors.
    """
    if not 0 <= start <= stop <= shape[0]:
        raise ValueError(f"{fqn}: rows [{start}, {stop}) are not within the {shape[0]} of shape {shape}")
    rows = torch.empty(stop - start, *shape[1:], dtype=torch.float32, device="cpu")
    if isinstance(rule, Constant):
        return rows.fill_(rule.value)
    if rows.numel() == 0:
        return rows
    block_rows = max(1, BLOCK_NUMEL // math.prod(shape[1:]))
    for block in range(start // block_rows, (stop - 1) // block_rows + 1):
        first = block * block_rows
        drawn = _draw_block(rule, seed=derive_seed(seed, fqn, block), shape=(block_rows, *shape[1:]))
        low, high = max(start, first), min(stop, first + block_rows)
        rows[low - start : high - start] = drawn[low - first : high - first]
    return rows


def _draw_block(rule: Normal | LogUniform, *, seed: int, shape: tuple[int, ...]) -> Tensor:
    # Always a whole block, also past the parameter's last row: what precedes a value in its stream never varies.
    generator = np.random.Generator(np.random.PCG64(seed))
    if isinstance(rule, LogUniform):
        uniform = torch.from_numpy(generator.random(shape, dtype=np.float32))
        return uniform.mul_(rule.high - rule.low).add_(rule.low).log_()
    return torch.from_numpy(generator.standard_normal(shape, dtype=np.float32)).mul_(rule.std)
