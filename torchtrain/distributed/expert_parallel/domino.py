"""Two halves of the tokens, each of which travels while the other is computed.

The halves are cut along the first dim, whatever they hold; a half without tokens exchanges nothing and does no harm.

Source: Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and
    Overlapping", section 3, for the slicing of the input; here the exchange of an expert layer is what hides.

Shape legend: N = this rank's tokens, P = ranks of the group, L = experts of a rank, R = rows sent, S = rows received,
D = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.expert_parallel.exchange import Traffic, exchange_counts, order_received
from torchtrain.distributed.expert_parallel.overlap import AllRoute, Exchange
from torchtrain.nn.moe import RoutedExperts
from torchtrain.nn.permutation import ExpertOrder, combine, reorder, sort_by_expert, spread
from torchtrain.nn.routing import Routing

NUM_SLICES = 2


class DominoDispatcher:
    """Both slices set out; one is computed while the other travels, there, and then back. A ``nn.moe.TokenDispatcher``.

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
        ids = routing.expert_ids_NK.tensor_split(NUM_SLICES)
        orders = [sort_by_expert(ids_NK, routing.num_experts) for ids_NK in ids]
        slices = [
            self._slice(index, order, traffic)
            for index, (order, traffic) in enumerate(zip(orders, self._exchange_counts(orders), strict=True))
        ]
        # The order of these lines is the order of the exchanges, mirrored in backward: see ``overlap``.
        outward = [
            one.there.start(spread(x, one.order)) for one, x in zip(slices, x_ND.tensor_split(NUM_SLICES), strict=True)
        ]
        homeward = [
            one.back.start(one.compute(one.there.finish(ticket), experts))
            for one, ticket in zip(slices, outward, strict=True)
        ]
        weights = routing.weights_NK.tensor_split(NUM_SLICES)
        rows = [one.back.finish(ticket) for one, ticket in zip(slices, homeward, strict=True)]
        return torch.cat(
            [combine(y_RD, w_NK, one.order) for one, y_RD, w_NK in zip(slices, rows, weights, strict=True)]
        )

    def _exchange_counts(self, orders: list[ExpertOrder]) -> list[Traffic]:
        """The counts of all slices in one exchange, so that the host waits for the device once."""
        num_ranks = self._group.size()
        counts = [order.offsets_E.diff(prepend=order.offsets_E.new_zeros(1)).view(num_ranks, -1) for order in orders]
        together = torch.stack(counts, dim=1)
        traffic = exchange_counts(together.flatten().cumsum(0).int(), self._group)
        shape = (num_ranks, len(orders), -1)
        views = [counts.view(shape) for counts in (traffic.sent_PL, traffic.received_PL, traffic.arrived_PL)]
        return [Traffic(*(counts[:, index] for counts in views)) for index in range(len(orders))]

    def _slice(self, index: int, order: ExpertOrder, traffic: Traffic) -> _Slice:
        there = AllRoute(f"slice {index} to experts", self._group, traffic.sent, traffic.received)
        back = AllRoute(f"slice {index} to tokens", self._group, traffic.received, traffic.sent)
        return _Slice(order, traffic, Exchange(there, is_kept=self._is_kept), Exchange(back, is_kept=self._is_kept))


@dataclass(frozen=True)
class _Slice:
    order: ExpertOrder
    traffic: Traffic
    there: Exchange
    back: Exchange

    def compute(self, x_SD: Tensor, experts: RoutedExperts) -> Tensor:
        local = order_received(self.traffic)
        y_SD = experts.compute(reorder(x_SD, local.slots_R, local.rows_R), local.offsets_E, is_exact=True)
        return reorder(y_SD, local.rows_R, local.slots_R)
