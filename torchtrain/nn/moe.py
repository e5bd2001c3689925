"""A feed-forward layer of many experts of which each token visits a few.

Shape legend: B = sequences, T = tokens of a sequence, N = B * T, D = hidden size, F = an expert's intermediate size,
E = experts, R = rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.kernels.grouped_mm import grouped_mm
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.permutation import combine, sort_by_expert, spread
from torchtrain.nn.routing import Router, Routing


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


class RoutedExperts(nn.Module):
    """SwiGLU experts as stacked weights: one grouped product per projection.

    ``forward`` is the whole journey of the tokens, so that a technique that gathers parameters around a module's call
    gathers them once, however often the dispatcher calls ``compute``.

    Attributes:
        local_weight: Turns a weight into the plain tensor of the experts that are here; replace it where weights are
            something else.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.local_weight: Callable[[Tensor], Tensor] = _as_it_is

    def forward(self, x_ND: Tensor, routing: Routing, dispatcher: TokenDispatcher) -> Tensor:
        """Return ``y_ND``, by the dispatcher."""
        return dispatcher.run(x_ND, routing, self)

    def compute(self, x_RD: Tensor, offsets_E: Tensor, *, is_exact: bool = False) -> Tensor:
        """Put rows through the experts they are sorted by.

        Args:
            x_RD: Rows of the experts that are here.
            offsets_E: int32, the end of each expert's rows. Rows past the last come back as zeros.
            is_exact: No rows are past it.

        Returns:
            ``y_RD``.
        """
        projections = tuple(self.local_weight(weight) for weight in (self.gate_proj, self.up_proj, self.down_proj))
        device_type = x_RD.device.type
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
            # An operator of our own is none that autocast knows.
            dtype = torch.get_autocast_dtype(device_type)
            x_RD = x_RD.to(dtype)
            projections = tuple(weight.to(dtype) for weight in projections)
        gate, up, down = projections
        gated_RF = F.silu(grouped_mm(x_RD, gate, offsets_E, is_exact=is_exact))
        hidden_RF = gated_RF * grouped_mm(x_RD, up, offsets_E, is_exact=is_exact)
        return grouped_mm(hidden_RF, down, offsets_E, is_exact=is_exact)

    def extra_repr(self) -> str:
        """Show sizes in ``print(model)``."""
        return "{} experts, {} x {}".format(*self.gate_proj.shape)


class TokenDispatcher(Protocol):
    """How tokens reach their experts and come back; expert parallelism installs its own."""

    def run(self, x_ND: Tensor, routing: Routing, experts: RoutedExperts) -> Tensor:
        """Send every token to its experts, compute, and add up by weight.

        Args:
            x_ND: This rank's tokens; there may be none.
            routing: Of these tokens, over the experts of the whole layer.
            experts: Those that are here; call its ``compute``, as often as is convenient.

        Returns:
            ``y_ND``.
        """
        ...


class LocalDispatcher:
    """All experts are here: sort, compute, add up. Deterministic, and drops no token."""

    def run(self, x_ND: Tensor, routing: Routing, experts: RoutedExperts) -> Tensor:
        """See ``TokenDispatcher``."""
        order = sort_by_expert(routing.expert_ids_NK, routing.num_experts)
        y_RD = experts.compute(spread(x_ND, order), order.offsets_E, is_exact=True)
        return combine(y_RD, routing.weights_NK, order)


class MoE(nn.Module):
    """Routed experts, and beside them one that every token visits, if there is one.

    Source: shared expert and its gate as in Qwen Team 2024, "Qwen1.5-MoE".

    Attributes:
        dispatcher: The ``TokenDispatcher`` in use; replace it to install another.
    """

    def __init__(
        self,
        *,
        router: Router,
        experts: RoutedExperts,
        shared_expert: FeedForward | None = None,
        shared_expert_gate: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared_expert = shared_expert
        self.shared_expert_gate = shared_expert_gate
        self.dispatcher: TokenDispatcher = LocalDispatcher()

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return ``y_BTD``."""
        routing = self.router(x_BTD)
        y_ND = self.experts(x_BTD.flatten(0, 1), routing, self.dispatcher)
        y_BTD = y_ND.unflatten(0, x_BTD.shape[:2])
        if self.shared_expert is None:
            return y_BTD
        shared_BTD = self.shared_expert(x_BTD)
        if self.shared_expert_gate is not None:
            shared_BTD = self.shared_expert_gate(x_BTD).sigmoid() * shared_BTD
        return y_BTD + shared_BTD
