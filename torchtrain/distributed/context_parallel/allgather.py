"""Attention with gathered keys and values: each rank computes its own queries against the keys before them.

One all-gather a layer forward and one reduce-scatter backward, each of keys and values together. Those that a rank sees
live until backward unless the block is recomputed. Later ranks see more keys: they compute longest and keep most.

Shape legend: B = batch, T = tokens of this rank, S = tokens of the whole sequence, E = tokens up to the end of this
rank's, C = ranks of the cp axis, N = query heads, K = key/value heads, H = head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.context_parallel.exchange import gather
from torchtrain.distributed.context_parallel.sequence_layout import SequenceLayout
from torchtrain.distributed.context_parallel.tail_attention import TailAttention


class AllGatherCore:
    """Gathers keys and values and attends from local queries, whose first one stands at ``T x cp_rank``.

    Args:
        tail: Attends from local queries to the keys up to theirs.
        layout: This rank's share, contiguous.
        group: Ranks of the cp axis.

    Numerics:
        The gradients that ranks find for a key or value are summed in the dtype in which they travel, the compute
        dtype; ``RingCore`` sums them in fp32.
    """

    def __init__(self, tail: TailAttention, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self._tail = tail
        self._layout = layout
        self._group = group

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Allow a local token to see itself and earlier tokens of its document; ``None`` means plain causal.

        Args:
            document_ids_BT: Those of the whole sequence.

        Returns:
            What ``TailAttention`` makes of the ids up to this rank's last token; later keys are left out.
        """
        if document_ids_BT is None:
            return None
        num_tokens = document_ids_BT.shape[1] // self._layout.cp_size
        seen_BE = document_ids_BT[:, : num_tokens * (self._layout.cp_rank + 1)]
        return self._tail.build_mask(seen_BE, num_tokens)

    @torch.compiler.disable
    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see ``AttentionCore``.

        Collective: the cp axis.
        """
        kv_C2BTKH = gather(torch.stack((k_BTKH, v_BTKH)), self._group)
        # Cut before tokens are brought together, which copies: what comes later is neither copied nor kept.
        seen_C2BTKH = kv_C2BTKH[: self._layout.cp_rank + 1]
        k_BEKH, v_BEKH = seen_C2BTKH.movedim(0, 2).flatten(2, 3).unbind(0)
        return self._tail(q_BTNH, k_BEKH, v_BEKH, mask)
