"""Tokens to rows sorted by expert, and back.

Both ways are gathers, in backward too: no two threads add to one row, so results are deterministic on every device.

Shape legend: N = tokens, K = experts a token visits, R = N * K rows, D = hidden size, E = experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertOrder:
    """Where each of a token's visits stands once rows are sorted by expert."""

    slots_R: Tensor
    """int64: the row's visit, counted token by token."""
    rows_R: Tensor
    """int64: the visit's row; the inverse."""
    offsets_E: Tensor
    """int32: the end of each expert's rows."""


def sort_by_expert(expert_ids_NK: Tensor, num_experts: int) -> ExpertOrder:
    """Sort visits by expert; those of one expert stay in the order of the tokens. No sync of host and device."""
    sorted_R, slots_R = expert_ids_NK.flatten().sort(stable=True)
    rows_R = torch.empty_like(slots_R)
    rows_R[slots_R] = torch.arange(len(slots_R), device=slots_R.device)
    experts_E = torch.arange(num_experts, device=slots_R.device)
    return ExpertOrder(slots_R, rows_R, torch.searchsorted(sorted_R, experts_E, right=True, out_int32=True))


def spread(x_ND: Tensor, order: ExpertOrder) -> Tensor:
    """Copy each token to the row of each of its visits; returns ``x_RD``."""
    return cast(Tensor, _Spread.apply(x_ND, order.slots_R, order.rows_R))


def reorder(x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Permute rows; returns ``x_RD[index_R]``.

    Args:
        x_RD: Rows.
        index_R: int64, a permutation.
        inverse_R: Its inverse.
    """
    return cast(Tensor, _Reorder.apply(x_RD, index_R, inverse_R))


def combine(y_RD: Tensor, weights_NK: Tensor, order: ExpertOrder) -> Tensor:
    """Add up each token's visits by weight; returns ``y_ND``.

    Numerics: products and sum in the dtype of the weights, fp32, rounded once.
    """
    y_NKD = reorder(y_RD, order.rows_R, order.slots_R).unflatten(0, weights_NK.shape)
    return (y_NKD * weights_NK[..., None]).sum(dim=1).to(y_RD.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, slots_R: Tensor, rows_R: Tensor) -> Tensor:
        num_tokens = x_ND.shape[0]
        num_choices = len(slots_R) // max(num_tokens, 1)
        ctx.shape = (num_tokens, num_choices)
        ctx.save_for_backward(rows_R)
        return x_ND[slots_R // max(num_choices, 1)]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (rows_R,) = ctx.saved_tensors
        return grads[0][rows_R].unflatten(0, ctx.shape).sum(dim=1), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_R)
        return x_RD[index_R]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (inverse_R,) = ctx.saved_tensors
        return grads[0][inverse_R], None, None
