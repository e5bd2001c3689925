"""Attention of some queries to some of the keys, and its gradients, in the form that partial results merge from.

On the CPU by torch's fused kernel; elsewhere by plain matrix products in fp32, a few query rows at a time.

Shape legend: B = batch, T = query tokens, E = key tokens, N = query heads, K = key/value heads, G = N / K, H = head
dim, R = query rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_SCORES = 1 << 25
"""Scores that exist at a time without a fused kernel: 128 MiB of them in fp32, and as much again in backward."""


@dataclass(frozen=True)
class Partial:
    """Attention to some of the keys.

    Shapes:
        out_BNTH: Softmax over these keys, times their values; 0 where a row sees none.
        lse_BNT: fp32, the log of the softmax's denominator; minus infinity where a row sees none.
    """

    out_BNTH: Tensor
    lse_BNT: Tensor


class MergedAttention:
    """Attention to a growing set of keys, kept in one fp32 output and one log-denominator, to which parts are added.

    Args:
        first: Of every row it must see at least one key. It is left as it is: selective recomputation keeps the
            kernel's result.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3.1.
    """

    def __init__(self, first: Partial) -> None:
        self._merged, self._is_own = first, False

    @property
    def partial(self) -> Partial:
        """What has been added up; in fp32 unless it is the first part alone."""
        return self._merged

    def add(self, part: Partial, rows: slice = slice(None)) -> None:
        """Add what some of the query rows find in keys that are new to them."""
        if not self._is_own:
            first, self._is_own = self._merged, True
            self._merged = Partial(first.out_BNTH.to(torch.float32, copy=True), first.lse_BNT.clone())
        out_BNRH, lse_BNR = self._merged.out_BNTH[:, :, rows], self._merged.lse_BNT[:, :, rows]
        both_BNR = torch.logaddexp(lse_BNR, part.lse_BNT)
        out_BNRH.mul_((lse_BNR - both_BNR).exp_()[..., None])
        out_BNRH.addcmul_(part.out_BNTH, (part.lse_BNT - both_BNR).exp_()[..., None])
        lse_BNR.copy_(both_BNR)


@dataclass(frozen=True)
class Visible:
    """Which of a block's keys its queries see.

    Shapes:
        mask_B1TE: Boolean, true where attention is allowed; ``None`` allows all.
    """

    mask_B1TE: Tensor | None
    is_causal: bool
    """T = E and no query sees a later key. Not together with a mask, which then says so itself."""


def resolve_visible(query_ids_BT: Tensor | None, key_ids_BE: Tensor | None, *, is_causal: bool) -> Visible:
    """Let a query see the keys of its document.

    Args:
        query_ids_BT: Document ids of the queries; ``None`` where a row is one document.
        key_ids_BE: Document ids of the keys; ``None`` likewise.
        is_causal: Whether the keys are the queries' own tokens; else they all stand before them.
    """
    if query_ids_BT is None or key_ids_BE is None:
        return Visible(None, is_causal)
    same_document_BTE = query_ids_BT[:, :, None] == key_ids_BE[:, None, :]
    return Visible((same_document_BTE.tril_() if is_causal else same_document_BTE)[:, None], is_causal=False)


def attend_block(q_BNTH: Tensor, k_BKEH: Tensor, v_BKEH: Tensor, visible: Visible) -> Partial:
    """Attend from a block of queries to a block of keys.

    Args:
        q_BNTH: Queries.
        k_BKEH: Keys; K divides N.
        v_BKEH: Values.
        visible: Which keys the queries see.

    Numerics:
        ``out`` has the dtype of the queries.
    """
    if q_BNTH.is_cpu:
        mask_B1TE = visible.mask_B1TE
        bias = None if mask_B1TE is None else _as_bias(mask_B1TE, q_BNTH.dtype)
        out_BNTH, lse_BNT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BNTH, k_BKEH, v_BKEH, 0.0, visible.is_causal, attn_mask=bias
        )
        if mask_B1TE is not None:  # The kernel gives 0 for rows that see nothing.
            lse_BNT = lse_BNT.masked_fill(~mask_B1TE.any(dim=-1), -math.inf)
        return Partial(out_BNTH, lse_BNT)
    return attend_block_plainly(q_BNTH, k_BKEH, v_BKEH, visible)


def differentiate_block(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKEH: Tensor,
    v_BKEH: Tensor,
    merged: Partial,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what this block of keys adds to the gradients.

    Args:
        grad_BNTH: Gradient of the merged output.
        q_BNTH: Queries.
        k_BKEH: Keys.
        v_BKEH: Values.
        merged: Output and log-denominator over *all* keys that the queries see, not only over this block.
        visible: Which keys the queries see.

    Returns:
        This block's part of the queries' gradient, and the gradients of its keys and values.
    """
    if q_BNTH.is_cpu:
        mask_B1TE = visible.mask_B1TE
        bias = None if mask_B1TE is None else _as_bias(mask_B1TE, q_BNTH.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_BNTH, q_BNTH, k_BKEH, v_BKEH, merged.out_BNTH, merged.lse_BNT, 0.0, visible.is_causal, attn_mask=bias
        )
    return differentiate_block_plainly(grad_BNTH, q_BNTH, k_BKEH, v_BKEH, merged, visible)


def attend_block_plainly(q_BNTH: Tensor, k_BKEH: Tensor, v_BKEH: Tensor, visible: Visible) -> Partial:
    """Do what ``attend_block`` does by matrix products, on any device."""
    outs, lses = [], []
    v_BKEH_fp32 = v_BKEH.float()
    for rows in _row_slices(q_BNTH, k_BKEH):
        scores_BKGRE = _scores(q_BNTH, k_BKEH, rows, visible)
        lse_BKGR = scores_BKGRE.logsumexp(dim=-1)
        probabilities_BKGRE = scores_BKGRE.sub_(_finite(lse_BKGR)[..., None]).exp_()
        outs.append(torch.einsum("bkgre,bkeh->bkgrh", probabilities_BKGRE, v_BKEH_fp32).flatten(1, 2))
        lses.append(lse_BKGR.flatten(1, 2))
    return Partial(torch.cat(outs, dim=2).to(q_BNTH.dtype), torch.cat(lses, dim=2))


def differentiate_block_plainly(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKEH: Tensor,
    v_BKEH: Tensor,
    merged: Partial,
    visible: Visible,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what ``differentiate_block`` does by matrix products, on any device.

    Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", appendix
    B.2.
    """
    k_fp32, v_fp32 = k_BKEH.float(), v_BKEH.float()
    grad_k_BKEH, grad_v_BKEH = torch.zeros_like(k_fp32), torch.zeros_like(v_fp32)
    groups = (k_BKEH.shape[1], -1)
    scale, grads_q = q_BNTH.shape[-1] ** -0.5, []
    delta_BNT = (grad_BNTH.float() * merged.out_BNTH.float()).sum(dim=-1)
    for rows in _row_slices(q_BNTH, k_BKEH):
        q_BKGRH = q_BNTH[:, :, rows].float().unflatten(1, groups)
        grad_BKGRH = grad_BNTH[:, :, rows].float().unflatten(1, groups)
        lse_BKGR1 = _finite(merged.lse_BNT[:, :, rows]).unflatten(1, groups)[..., None]
        scores_BKGRE = _scores(q_BNTH, k_BKEH, rows, visible)
        p_BKGRE = scores_BKGRE.sub_(lse_BKGR1).exp_()
        grad_v_BKEH += torch.einsum("bkgre,bkgrh->bkeh", p_BKGRE, grad_BKGRH)
        grad_p_BKGRE = torch.einsum("bkgrh,bkeh->bkgre", grad_BKGRH, v_fp32)
        delta_BKGR1 = delta_BNT[:, :, rows].unflatten(1, groups)[..., None]
        grad_s_BKGRE = grad_p_BKGRE.sub_(delta_BKGR1).mul_(p_BKGRE).mul_(scale)
        grads_q.append(torch.einsum("bkgre,bkeh->bkgrh", grad_s_BKGRE, k_fp32).flatten(1, 2))
        grad_k_BKEH += torch.einsum("bkgre,bkgrh->bkeh", grad_s_BKGRE, q_BKGRH)
    return torch.cat(grads_q, dim=2), grad_k_BKEH, grad_v_BKEH


def _scores(q_BNTH: Tensor, k_BKEH: Tensor, rows: slice, visible: Visible) -> Tensor:
    q_BKGRH = q_BNTH[:, :, rows].float().unflatten(1, (k_BKEH.shape[1], -1))
    scores_BKGRE = torch.einsum("bkgrh,bkeh->bkgre", q_BKGRH, k_BKEH.float()).mul_(q_BNTH.shape[-1] ** -0.5)
    if visible.mask_B1TE is not None:
        return scores_BKGRE.masked_fill_(~visible.mask_B1TE[:, None, :, rows], -math.inf)
    if visible.is_causal:
        places_E = torch.arange(k_BKEH.shape[2], device=k_BKEH.device)
        return scores_BKGRE.masked_fill_(places_E > places_E[rows, None], -math.inf)
    return scores_BKGRE


def _row_slices(q_BNTH: Tensor, k_BKEH: Tensor) -> Iterator[slice]:
    size_B, size_N, size_T, _ = q_BNTH.shape
    size_R = max(1, _MAX_SCORES // (size_B * size_N * k_BKEH.shape[2]))
    yield from (slice(start, start + size_R) for start in range(0, size_T, size_R))


def _finite(lse: Tensor) -> Tensor:
    """Subtracting minus infinity from itself is no number; a row that sees nothing has no probabilities either way."""
    return lse.clamp_min(torch.finfo(lse.dtype).min)


def _as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    allowed, forbidden = torch.tensor((0.0, -math.inf), dtype=dtype, device=mask.device)
    return torch.where(mask, allowed, forbidden)
