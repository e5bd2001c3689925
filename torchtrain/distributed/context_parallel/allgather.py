"""Attention with gathered keys and values: each rank computes its own queries against the keys before them.

One all-gather a layer forward and one reduce-scatter backward, each of keys and values together. Gathered keys and
values live until backward unless the block is recomputed. Later ranks see more keys: they compute longest.

Shape legend: B = batch, T = tokens of this rank, S = tokens of the whole sequence, E = tokens up to the end of this
rank's, C = ranks of the cp axis, N = query heads, K = key/value heads, H = head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from torchtrain.distributed.context_parallel.exchange import gather
from torchtrain.distributed.context_parallel.sequence_layout import SequenceLayout
from torchtrain.nn.attention import AttentionCore


class AllGatherCore:
    """Gathers keys and values and attends from local queries, whose first one stands at ``T x cp_rank``.

    Args:
        inner: Attends with the mask that this core builds.
        layout: This rank's share, contiguous.
        group: Ranks of the cp axis.
    """

    def __init__(self, inner: AttentionCore, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._layout = layout
        self._group = group

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Allow a local token to see itself and earlier tokens of its document; ``None`` means plain causal.

        Args:
            document_ids_BT: Those of the whole sequence.

        Returns:
            Boolean ``mask_B1TE``, true where attention is allowed: keys behind this rank's last token are left out.
        """
        if document_ids_BT is None:
            return None
        mine_BT = self._layout.take(document_ids_BT)
        first = mine_BT.shape[1] * self._layout.cp_rank
        seen_BE = document_ids_BT[:, : first + mine_BT.shape[1]]
        return (mine_BT[:, :, None] == seen_BE[:, None, :]).tril_(diagonal=first)[:, None]

    @torch.compiler.disable
    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see ``AttentionCore``.

        Collective: the cp axis.
        """
        num_tokens = q_BTNH.shape[1]
        end = num_tokens * (self._layout.cp_rank + 1)
        kv_C2BTKH = gather(torch.stack((k_BTKH, v_BTKH)), self._group)
        k_BEKH, v_BEKH = kv_C2BTKH.movedim(0, 2).flatten(2, 3)[:, :, :end].unbind(0)
        if mask is not None or end == num_tokens:
            return self._inner(q_BTNH, k_BEKH, v_BEKH, mask)
        q_BNTH, k_BKEH, v_BKEH = (x.transpose(1, 2) for x in (q_BTNH, k_BEKH, v_BEKH))
        bias = causal_lower_right(num_tokens, end)
        out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKEH, v_BKEH, attn_mask=bias, enable_gqa=True)
        return out_BNTH.transpose(1, 2)
