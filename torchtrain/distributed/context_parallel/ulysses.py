"""Attention by an exchange of heads for tokens: each rank computes the whole sequence for some of the heads.

Two all-to-alls a layer and direction: one carries queries, keys and values, the other the output.

Shape legend: B = batch, T = tokens of this rank, S = tokens of the whole sequence = T x C, C = ranks of the cp axis,
N = query heads, K = key/value heads, H = head dim; Q = query heads of one rank after the exchange, L = its key/value
heads, A = Q + 2 L.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.attention_volume import exchanged_key_value_heads
from torchtrain.distributed.context_parallel.exchange import exchange
from torchtrain.distributed.context_parallel.tail_attention import TailAttention


class UlyssesCore:
    """Exchanges heads for tokens around another core.

    Where key/value heads are fewer than ranks, each is sent to every rank that computes one of its query heads, and
    its gradients from there are summed.

    Args:
        inner: Attends over whole sequences.
        group: Ranks of the cp axis. The query heads must be a multiple of their number.
    """

    def __init__(self, inner: TailAttention, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._group = group

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Build the mask of the whole sequence, from its document ids."""
        return self._inner.build_mask(document_ids_BT)

    @torch.compiler.disable
    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see ``AttentionCore``.

        Collective: the cp axis.
        """
        size = self._group.size()
        num_queries, num_keys = q_BTNH.shape[2], k_BTKH.shape[2]
        repeats = exchanged_key_value_heads(num_keys, size) // num_keys
        if repeats > 1:
            # Rank i's share of the repeated heads then begins with the head that its first query head belongs to.
            k_BTKH, v_BTKH = (x.repeat_interleave(repeats, dim=2) for x in (k_BTKH, v_BTKH))
        # Ranks come first before the pieces are joined: what is sent is then copied once.
        shares = [x.unflatten(2, (size, -1)).movedim(2, 0) for x in (q_BTNH, k_BTKH, v_BTKH)]
        qkv_CBTAH = exchange(torch.cat(shares, dim=3), self._group)
        qkv_BSAH = qkv_CBTAH.movedim(0, 1).flatten(1, 2)
        q_BSQH, k_BSLH, v_BSLH = qkv_BSAH.split([share.shape[3] for share in shares], dim=2)
        out_BSQH = self._inner(q_BSQH, k_BSLH, v_BSLH, mask)
        out_CBTQH = exchange(out_BSQH.unflatten(1, (size, -1)).movedim(1, 0), self._group)
        return out_CBTQH.movedim(0, 2).reshape(*q_BTNH.shape[:2], num_queries, -1)
