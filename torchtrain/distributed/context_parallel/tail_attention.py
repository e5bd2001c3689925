"""Causal attention of queries that are the last tokens of the keys, all of it on one rank.

With as many queries as keys this is attention over a whole sequence. Two ways: by torch's attention with a mask, which
has the best kernels on accelerators, and in two blocks, the keys before the queries and those beside them. Blocks need
no mask that outlives a layer: torch's kernels keep one of T x E numbers per layer for backward.

Shape legend: B = batch, T = queries, E = keys, N = query heads, K = key/value heads, H = head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

from torchtrain.distributed.context_parallel.block_attention import (
    MergedAttention,
    Partial,
    Visible,
    attend_block,
    differentiate_block,
    resolve_visible,
)
from torchtrain.nn.attention import SDPACore


class TailAttention:
    """Attends from the last of a sequence's tokens so far.

    Args:
        is_blockwise: Whether to attend in two blocks; else by torch's attention.
    """

    def __init__(self, *, is_blockwise: bool) -> None:
        self._is_blockwise = is_blockwise
        self._whole = SDPACore()

    def build_mask(self, document_ids_BE: Tensor | None, num_queries: int | None = None) -> Tensor | None:
        """Prepare what keeps documents apart: their ids for blocks, else a boolean ``mask_B1TE``; ``None`` as it is.

        Args:
            document_ids_BE: Of the keys' tokens.
            num_queries: T; by default E.
        """
        if document_ids_BE is None or self._is_blockwise:
            return document_ids_BE
        first = 0 if num_queries is None else document_ids_BE.shape[1] - num_queries
        mine_BT = document_ids_BE[:, first:]
        return (mine_BT[:, :, None] == document_ids_BE[:, None, :]).tril_(diagonal=first)[:, None]

    def __call__(self, q_BTNH: Tensor, k_BEKH: Tensor, v_BEKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; returns ``out_BTNH``."""
        if not self._is_blockwise and (mask is not None or q_BTNH.shape[1] == k_BEKH.shape[1]):
            return self._whole(q_BTNH, k_BEKH, v_BEKH, mask)
        q_BNTH, k_BKEH, v_BKEH = (x.transpose(1, 2) for x in (q_BTNH, k_BEKH, v_BEKH))
        if self._is_blockwise:
            return _TwoBlocks.apply(q_BNTH, k_BKEH, v_BKEH, mask).transpose(1, 2)
        bias = causal_lower_right(q_BNTH.shape[2], k_BKEH.shape[2])
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKEH, v_BKEH, attn_mask=bias, enable_gqa=True)
        return out_BNTH.transpose(1, 2)


class _TwoBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNTH: Tensor, k_BKEH: Tensor, v_BKEH: Tensor, document_ids_BE: Tensor | None) -> Tensor:
        merging: MergedAttention | None = None
        for keys, visible in _blocks(q_BNTH, k_BKEH, document_ids_BE):
            part = attend_block(q_BNTH, k_BKEH[:, :, keys], v_BKEH[:, :, keys], visible)
            if merging is None:
                merging = MergedAttention(part)
            else:
                merging.add(part)
        assert merging is not None
        merged = merging.partial
        out_BNTH = merged.out_BNTH.to(q_BNTH.dtype)
        ctx.save_for_backward(q_BNTH, k_BKEH, v_BKEH, out_BNTH, merged.lse_BNT, document_ids_BE)
        return out_BNTH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # pyrefly: ignore[bad-override]
        q_BNTH, k_BKEH, v_BKEH, out_BNTH, lse_BNT, document_ids_BE = ctx.saved_tensors
        merged = Partial(out_BNTH, lse_BNT)
        grad_q_BNTH = torch.zeros_like(q_BNTH, dtype=torch.float32)
        grad_k_BKEH, grad_v_BKEH = torch.empty_like(k_BKEH), torch.empty_like(v_BKEH)
        for keys, visible in _blocks(q_BNTH, k_BKEH, document_ids_BE):
            part_q, grad_k_BKEH[:, :, keys], grad_v_BKEH[:, :, keys] = differentiate_block(
                grads[0], q_BNTH, k_BKEH[:, :, keys], v_BKEH[:, :, keys], merged, visible
            )
            grad_q_BNTH += part_q
        return grad_q_BNTH.to(q_BNTH.dtype), grad_k_BKEH, grad_v_BKEH, None


def _blocks(q_BNTH: Tensor, k_BKEH: Tensor, document_ids_BE: Tensor | None) -> Iterator[tuple[slice, Visible]]:
    """The keys of each block and what the queries see of them; first those among which every query sees itself."""
    first = k_BKEH.shape[2] - q_BNTH.shape[2]
    query_ids_BT = None if document_ids_BE is None else document_ids_BE[:, first:]
    yield slice(first, None), resolve_visible(query_ids_BT, query_ids_BT, is_causal=True)
    if first > 0:
        key_ids_BE = None if document_ids_BE is None else document_ids_BE[:, :first]
        yield slice(first), resolve_visible(query_ids_BT, key_ids_BE, is_causal=False)
