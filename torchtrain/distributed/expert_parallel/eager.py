"""The plain dispatcher, one thing after the other: what all others must equal.

Shape legend: N = this rank's tokens, R = rows sent, S = rows received, D = hidden size.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.expert_parallel.exchange import (
    exchange_counts,
    order_received,
    send_back,
    send_to_experts,
)
from torchtrain.nn.moe import RoutedExperts
from torchtrain.nn.permutation import combine, reorder, sort_by_expert, spread
from torchtrain.nn.routing import Routing


class EagerDispatcher:
    """Exchange counts, sort, exchange rows, sort again, compute, and all the way back. A ``nn.moe.TokenDispatcher``.

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
        x_SD = send_to_experts(spread(x_ND, order), traffic, self._group, is_kept=self._is_kept)
        local = order_received(traffic)
        y_SD = experts.compute(reorder(x_SD, local.slots_R, local.rows_R), local.offsets_E, is_exact=True)
        y_RD = send_back(reorder(y_SD, local.rows_R, local.slots_R), traffic, self._group, is_kept=self._is_kept)
        return combine(y_RD, routing.weights_NK, order)
