"""The plain exchange, with what happens on the device in fewer passes over memory.

Rows are spread, added up and multiplied by the backends that the kernel registry prefers. Where one of this rank's
experts has no rows, the plain operations step in: fused ones of accelerators are not required to take empty groups.

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
from torchtrain.kernels.permutation import permute, unpermute
from torchtrain.nn.moe import RoutedExperts
from torchtrain.nn.permutation import sort_by_expert
from torchtrain.nn.routing import Routing


class FusedDispatcher:
    """Eager's exchange around ops of the kernel registry. A ``nn.moe.TokenDispatcher``.

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
        # Known to the host already: no sync.
        has_idle_expert = 0 in traffic.received_PL.sum(dim=0).tolist()
        backend = "eager" if has_idle_expert else None
        num_choices = routing.expert_ids_NK.shape[1]
        x_RD = permute(x_ND, order.slots_R, order.rows_R, num_choices, backend=backend)
        x_SD = send_to_experts(x_RD, traffic, self._group, is_kept=self._is_kept)
        local = order_received(traffic)
        x_SD = permute(x_SD, local.slots_R, local.rows_R, num_choices=1, backend=backend)
        y_SD = experts.compute(x_SD, local.offsets_E, is_exact=True)
        # The way back to the order of arrival is a permutation too, the inverse one.
        y_SD = permute(y_SD, local.rows_R, local.slots_R, num_choices=1, backend=backend)
        y_RD = send_back(y_SD, traffic, self._group, is_kept=self._is_kept)
        return unpermute(y_RD, routing.weights_NK, order.slots_R, order.rows_R, backend=backend)
