"""Cross-entropy straight from the head's input, so that logits exist for a few tokens at a time.

One function serves the whole vocabulary and a shard of it: what ranks have to tell each other is three numbers a token,
and stands behind two hooks. Not for averaging, as in ``cross_entropy``.

Shape legend: B = batch, T = tokens, N = B * T, C = tokens of one chunk, D = hidden size, V = vocabulary, or the shard
of it that is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtrain.losses.cross_entropy import IGNORE_INDEX


def _keep(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class VocabularyShard:
    """Which classes are here, and how to combine with the ranks that hold the others."""

    start: int
    """The first class."""
    vocab_size: int | None = None
    """Classes on all ranks; None: those that are here are all."""
    reduce_max: Callable[[Tensor], Tensor] = _keep
    """The maximum over ranks, element by element, in a new tensor."""
    reduce_sum: Callable[[Tensor], Tensor] = _keep
    """The sum over ranks, element by element, in a new tensor."""


WHOLE_VOCABULARY = VocabularyShard(start=0)


class ChunkedLoss:
    """Token losses with the logits of ``chunk_size`` tokens at a time. A ``nn.decoder.TokenLoss``."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size

    def __call__(self, x_BTD: Tensor, lm_head: nn.Linear, labels_BT: Tensor) -> Tensor:
        """Score every token; see ``TokenLoss``. The head has no bias."""
        return linear_token_losses(x_BTD, lm_head.weight, labels_BT, chunk_size=self._chunk_size)


def linear_token_losses(
    x_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    *,
    chunk_size: int | None,
    shard: VocabularyShard = WHOLE_VOCABULARY,
) -> Tensor:
    """Compute each token's negative log-likelihood under ``softmax(x @ weight.T)``.

    Args:
        x_BTD: Any float dtype, the whole of it on every rank that holds a shard.
        weight_VD: The classes that are here, in the dtype of ``x_BTD``.
        labels_BT: int64, already shifted, counted in the whole vocabulary; ``IGNORE_INDEX`` where nothing is learned.
            The loss of any other label outside of the vocabulary is not a number, which costs no host sync to find.
        chunk_size: Tokens whose logits exist at a time; backward computes them again. ``None`` computes all at once and
            keeps them for backward, which costs one matrix product less.
        shard: Which classes ``weight_VD`` holds.

    Returns:
        fp32 ``losses_BT``, exactly 0 with no gradient where the label is ignored; equal on all ranks of the shards.
        The gradient of ``x_BTD`` is what the classes here contribute: the caller sums it over the shards.

    Collective: ``reduce_max`` and ``reduce_sum`` of ``shard`` once in the forward, for all tokens.

    Numerics: logits and their gradient in the dtype of the inputs, softmax and loss in fp32. The weight's gradient is
        added up over chunks in fp32. fp64 stays fp64.
    """
    if torch.is_autocast_enabled(x_BTD.device.type):
        # A function of our own is no operator that autocast knows.
        dtype = torch.get_autocast_dtype(x_BTD.device.type)
        x_BTD, weight_VD = x_BTD.to(dtype), weight_VD.to(dtype)
    losses_N = _LinearTokenLosses.apply(x_BTD.flatten(0, 1), weight_VD, labels_BT.flatten(), chunk_size, shard)
    # A copy for the reason that ``token_losses`` has.
    return cast(Tensor, losses_N).view_as(labels_BT).clone()


class _LinearTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_size: int | None, shard: VocabularyShard
    ) -> Tensor:
        num_tokens = x_ND.shape[0]
        highest_N, total_N, target_N = x_ND.new_zeros((3, num_tokens), dtype=_accurate(x_ND.dtype))
        logits = _LogitsBuffer(x_ND, weight_VD, chunk_size)
        for rows in logits.chunks():
            logits_CV = logits.compute(rows)
            column_C, is_here_C = _locate(labels_N[rows], weight_VD.shape[0], shard)
            target_N[rows] = logits_CV.gather(1, column_C[:, None])[:, 0] * is_here_C
            highest_N[rows] = logits_CV.amax(dim=-1)
            total_N[rows] = logits_CV.sub_(highest_N[rows, None]).exp_().sum(dim=-1)
        top_N = shard.reduce_max(highest_N)
        total_N, target_N = shard.reduce_sum(torch.stack([total_N * (highest_N - top_N).exp_(), target_N]))
        log_total_N = total_N.log_().add_(top_N)
        ctx.chunk_size, ctx.shard = chunk_size, shard
        kept = (logits.buffer_CV, highest_N) if chunk_size is None else (None, None)
        ctx.save_for_backward(x_ND, weight_VD, labels_N, log_total_N, *kept)
        is_unknown_N = (labels_N < 0) | (labels_N >= (shard.vocab_size or weight_VD.shape[0]))
        losses_N = (log_total_N - target_N).masked_fill_(is_unknown_N, math.nan)
        return losses_N.masked_fill_(labels_N == IGNORE_INDEX, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x_ND, weight_VD, labels_N, log_total_N, exponentials_NV, highest_N = ctx.saved_tensors
        upstream_N = torch.where(labels_N == IGNORE_INDEX, 0.0, grads[0])
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x_ND = torch.empty_like(x_ND) if wants_x else None
        # One product rounds once, whatever its dtype; a sum of products needs a better one.
        is_one_chunk = ctx.chunk_size is None or ctx.chunk_size >= x_ND.shape[0]
        sum_dtype = weight_VD.dtype if is_one_chunk else _accurate(weight_VD.dtype)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=sum_dtype) if wants_weight else None
        logits = _LogitsBuffer(x_ND, weight_VD, ctx.chunk_size)
        for rows in logits.chunks():
            if exponentials_NV is None:
                d_CV = logits.compute(rows).sub_(log_total_N[rows, None]).exp_()
            else:
                scale_N = (highest_N - log_total_N).exp_()
                d_CV = torch.mul(exponentials_NV, scale_N[:, None], out=logits.buffer_CV)
            column_C, is_here_C = _locate(labels_N[rows], weight_VD.shape[0], ctx.shard)
            d_CV.scatter_add_(1, column_C[:, None], -is_here_C[:, None].to(d_CV.dtype))
            d_CV = logits.round(d_CV.mul_(upstream_N[rows, None]))
            if grad_x_ND is not None:
                torch.mm(d_CV, weight_VD, out=grad_x_ND[rows])
            if grad_weight_VD is not None:
                _add_product_(grad_weight_VD, d_CV.T, x_ND[rows])
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_x_ND, grad_weight_VD, None, None, None


def _accurate(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _LogitsBuffer:
    """Memory for the logits of one chunk after the other: a new tensor for each would be paged in anew."""

    def __init__(self, x_ND: Tensor, weight_VD: Tensor, chunk_size: int | None) -> None:
        self._x_ND, self._weight_VD = x_ND, weight_VD
        num_tokens = x_ND.shape[0]
        self._size = min(chunk_size or num_tokens, num_tokens)
        self.buffer_CV = x_ND.new_empty((self._size, weight_VD.shape[0]), dtype=_accurate(x_ND.dtype))

    @cached_property
    def _rounded_CV(self) -> Tensor:
        """Memory for what is in the dtype of the inputs, which is the buffer itself where that is accurate."""
        buffer_CV = self.buffer_CV
        return buffer_CV if self._x_ND.dtype == buffer_CV.dtype else self._x_ND.new_empty(buffer_CV.shape)

    def chunks(self) -> Iterator[slice]:
        num_tokens = self._x_ND.shape[0]
        return (slice(start, min(start + self._size, num_tokens)) for start in range(0, num_tokens, self._size))

    def compute(self, rows: slice) -> Tensor:
        """Fill the buffer with logits that are rounded as the head's own output would be."""
        num_rows = rows.stop - rows.start
        logits_CV = self.buffer_CV[:num_rows]
        rounded_CV = torch.mm(self._x_ND[rows], self._weight_VD.T, out=self._rounded_CV[:num_rows])
        return logits_CV if rounded_CV.dtype == logits_CV.dtype else logits_CV.copy_(rounded_CV)

    def round(self, values_CV: Tensor) -> Tensor:
        """Bring what was made of the logits into the dtype of the inputs; the logits may be lost."""
        if values_CV.dtype == self._x_ND.dtype:
            return values_CV
        return self._rounded_CV[: values_CV.shape[0]].copy_(values_CV)


def _locate(labels_C: Tensor, num_classes: int, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Each label's column here, and whether it is here at all; where it is not, any column."""
    column_C = labels_C - shard.start
    return column_C.clamp(0, num_classes - 1), (column_C >= 0) & (column_C < num_classes)


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
