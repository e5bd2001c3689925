"""The gated delta net by an exchange of heads for tokens: each rank runs the whole sequence for some of the heads.

The convolution goes with them: each rank filters the channels of its heads. Three all-to-alls a layer and direction:
queries, keys and values; decay and beta, in fp32; the output.

Shape legend: B = batch, T = tokens of this rank, S = tokens of the whole sequence = T x C, C = ranks of the cp axis,
K = query/key heads, N = value heads, H = size of a key, V = size of a value, W = tokens under the convolution.

Source: the exchange as in Jacobs et al. 2023, "DeepSpeed Ulysses".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.context_parallel.exchange import exchange
from torchtrain.nn.gated_delta_net import DeltaNetCore, DeltaNetInputs


class UlyssesDeltaNetCore:
    """Exchanges heads for tokens around another core.

    Args:
        inner: Runs whole sequences.
        group: Ranks of the cp axis. The key heads must be a multiple of their number; the value heads then are too.
    """

    def __init__(self, inner: DeltaNetCore, group: dist.ProcessGroup) -> None:
        self._inner = inner
        self._group = group

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Build the mask of the whole sequence, from its document ids."""
        return self._inner.build_mask(document_ids_BT)

    @torch.compiler.disable
    def __call__(self, inputs: DeltaNetInputs, mask: Tensor | None) -> Tensor:
        """Convolve and run the rule; see ``DeltaNetCore``.

        Collective: the cp axis.
        """
        q_BSKH, k_BSKH, v_BSNV = self._swap(inputs.q_BTKH, inputs.k_BTKH, inputs.v_BTNV)
        log_decay_BSN1, beta_BSN1 = self._swap(inputs.log_decay_BTN[..., None], inputs.beta_BTN[..., None])
        mine = DeltaNetInputs(
            q_BTKH=q_BSKH,
            k_BTKH=k_BSKH,
            v_BTNV=v_BSNV,
            log_decay_BTN=log_decay_BSN1.squeeze(-1),
            beta_BTN=beta_BSN1.squeeze(-1),
            q_filter_KHW=self._share(inputs.q_filter_KHW),
            k_filter_KHW=self._share(inputs.k_filter_KHW),
            v_filter_NVW=self._share(inputs.v_filter_NVW),
        )
        out_BSNV = self._inner(mine, mask)
        out_CBTNV = exchange(out_BSNV.unflatten(1, (self._group.size(), -1)).movedim(1, 0), self._group)
        return out_CBTNV.movedim(0, 2).flatten(2, 3)

    def _swap(self, *parts: Tensor) -> list[Tensor]:
        """Give up tokens' other heads for this rank's heads of all tokens, in one exchange.

        Args:
            parts: ``[B, T, heads, size]`` each.

        Returns:
            ``[B, S, heads / C, size]`` each.
        """
        size = self._group.size()
        # Ranks come first before the pieces are joined: what is sent is then copied once.
        shares = [part.unflatten(2, (size, -1)).movedim(2, 0) for part in parts]
        sent = torch.cat([share.flatten(3) for share in shares], dim=-1)
        received = exchange(sent, self._group).movedim(0, 1).flatten(1, 2)
        pieces = received.split([share.shape[3] * share.shape[4] for share in shares], dim=-1)
        return [piece.unflatten(-1, share.shape[3:]) for piece, share in zip(pieces, shares, strict=True)]

    def _share(self, filters: Tensor) -> Tensor:
        return filters.chunk(self._group.size())[self._group.rank()]
