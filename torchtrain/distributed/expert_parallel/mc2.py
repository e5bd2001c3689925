"""The exchange taken apart by peers: the rows of one are computed as soon as they are there, and sent home at once.

Rows from one rank are sorted by expert already, so nothing is sorted twice. The rank ``i`` ahead is sent to while the
rank ``i`` behind is received from; this rank's own rows go nowhere and are computed first.

On an NPU the name stands for operators that join the exchange and the grouped product; those are not used here.

Shape legend: N = this rank's tokens, P = ranks of the group, L = experts of a rank, R = rows sent, S = rows received,
D = hidden size.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.expert_parallel.exchange import Traffic, exchange_counts
from torchtrain.distributed.expert_parallel.overlap import Exchange, PeerRoute
from torchtrain.nn.moe import RoutedExperts
from torchtrain.nn.permutation import combine, sort_by_expert, spread
from torchtrain.nn.routing import Routing


class MC2Dispatcher:
    """One small exchange a peer, each with its own product. A ``nn.moe.TokenDispatcher``.

    Args:
        group: Ranks that the experts are split over, in the order of the experts.
        is_exchange_kept: Whether activation checkpointing keeps what travelled, or exchanges again.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_exchange_kept: bool) -> None:
        self._group = group
        self._is_kept = is_exchange_kept

    def run(self, x_ND: Tensor, routing: Routing, experts: RoutedExperts) -> Tensor:
        """See ``TokenDispatcher``.

        Collective: the group; any of its ranks may have no tokens.
        """
        order = sort_by_expert(routing.expert_ids_NK, routing.num_experts)
        traffic = exchange_counts(order.offsets_E, self._group)
        sent, here, num_ranks = traffic.sent, self._group.rank(), self._group.size()
        rows = list(spread(x_ND, order).split(sent))
        ahead = [(here + distance) % num_ranks for distance in range(1, num_ranks)]
        behind = [(here - distance) % num_ranks for distance in range(1, num_ranks)]
        pairs = [self._exchanges(traffic, to, source) for to, source in zip(ahead, behind, strict=True)]
        # The order of these lines is the order of the messages, mirrored in backward: see ``overlap``.
        outward = [there.start(rows[to]) for (there, _), to in zip(pairs, ahead, strict=True)]
        rows[here] = self._compute(rows[here], traffic, here, experts)
        homeward = [
            back.start(self._compute(there.finish(ticket), traffic, source, experts))
            for (there, back), ticket, source in zip(pairs, outward, behind, strict=True)
        ]
        for (_, back), ticket, to in zip(pairs, homeward, ahead, strict=True):
            rows[to] = back.finish(ticket)
        return combine(torch.cat(rows), routing.weights_NK, order)

    def _exchanges(self, traffic: Traffic, ahead: int, behind: int) -> tuple[Exchange, Exchange]:
        """Rows to the experts of the rank ahead, from the tokens of the rank behind; and both home again."""
        sent, received = traffic.sent[ahead], traffic.received[behind]
        there = PeerRoute(f"peer {ahead} to experts", self._group, ahead, behind, sent, received)
        back = PeerRoute(f"peer {ahead} to tokens", self._group, behind, ahead, received, sent)
        return Exchange(there, is_kept=self._is_kept), Exchange(back, is_kept=self._is_kept)

    def _compute(self, x_SD: Tensor, traffic: Traffic, source: int, experts: RoutedExperts) -> Tensor:
        """The rows of one rank through the experts; without rows there is nothing to do, but for this rank's own.

        Those are computed also where there are none, so that the weights always get a gradient.
        """
        if x_SD.shape[0] == 0 and source != self._group.rank():
            return x_SD
        offsets_L = traffic.arrived_PL[source].cumsum(0).int()
        return experts.compute(x_SD, offsets_L, is_exact=True)
