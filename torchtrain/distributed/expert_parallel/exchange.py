"""Rows to the ranks of their experts, and back: how many first, then the rows, with gradients.

Pieces for dispatchers, which decide what is sent when. Every rank of the group calls each of these equally often, with
rows or without: a rank that has none to send still answers.

Shape legend: P = ranks of the group, E = experts of the layer, L = E / P = experts of a rank, R = rows to be sent, S =
rows received, D = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from torchtrain.nn.permutation import ExpertOrder, sort_by_expert
from torchtrain.nn.recomputation import keep

WHOLE = "expert_exchange::whole"
"""Label for profilers, followed by the name of an exchange that nothing else overlaps."""


@dataclass(frozen=True)
class Traffic:
    """Who sends how many rows to whom in one layer, as this rank sees it."""

    sent_PL: Tensor
    """int64 on the host: this rank's rows for each expert, by the expert's rank."""
    received_PL: Tensor
    """int64 on the host: rows for this rank's experts, by the rank that they come from."""
    arrived_PL: Tensor
    """``received_PL`` on the device, for what is computed there: a copy back would wait for the device once more."""

    @property
    def sent(self) -> list[int]:
        """Rows to each rank."""
        return self.sent_PL.sum(dim=1).tolist()

    @property
    def received(self) -> list[int]:
        """Rows from each rank."""
        return self.received_PL.sum(dim=1).tolist()


def exchange_counts(offsets_E: Tensor, group: dist.ProcessGroup) -> Traffic:
    """Tell each rank how many rows it will get for each of its experts.

    The one sync of host and device in a dispatch: sizes of the buffers to come. A recomputation has them already.

    Args:
        offsets_E: int32, the end of each expert's rows, as ``sort_by_expert`` returns them; expert e lives on rank
            e // L.
        group: Ranks that the experts are split over.

    Collective: the group, in the first forward only.
    """

    def ask() -> Tensor:
        counts_PL = offsets_E.diff(prepend=offsets_E.new_zeros(1)).long().view(group.size(), -1)
        answers_PL = torch.empty_like(counts_PL)
        with record_function(f"{WHOLE} counts"):
            dist.all_to_all_single(answers_PL, counts_PL, group=group)
        return torch.stack([counts_PL, answers_PL])

    on_device = keep(ask)
    sent_PL, received_PL = keep(on_device.cpu)
    return Traffic(sent_PL, received_PL, on_device[1])


def send_to_experts(x_RD: Tensor, traffic: Traffic, group: dist.ProcessGroup, *, is_kept: bool = True) -> Tensor:
    """Send rows, sorted by expert, to their experts' ranks.

    Args:
        x_RD: All rows of rank 0's experts first.
        traffic: Of these rows.
        group: As for ``exchange_counts``.
        is_kept: Whether a recomputation takes what was received the first time, rather than exchange again.

    Returns:
        ``x_SD``: all rows of rank 0 first, of each rank sorted by expert.

    Collective: the group, in forward and in backward.
    """
    return cast(Tensor, _Exchange.apply(x_RD, traffic.sent, traffic.received, group, is_kept, "to experts"))


def send_back(y_SD: Tensor, traffic: Traffic, group: dist.ProcessGroup, *, is_kept: bool = True) -> Tensor:
    """Undo ``send_to_experts`` on the results of the rows; returns ``y_RD``.

    Collective: the group, in forward and in backward.
    """
    return cast(Tensor, _Exchange.apply(y_SD, traffic.received, traffic.sent, group, is_kept, "to tokens"))


def order_received(traffic: Traffic) -> ExpertOrder:
    """How the rows received are sorted by expert; those of one expert stay in the order of the ranks they came from."""
    num_ranks, num_local = traffic.received_PL.shape
    ids = torch.arange(num_local, device=traffic.arrived_PL.device).repeat(num_ranks)
    ids_S = ids.repeat_interleave(traffic.arrived_PL.flatten(), output_size=sum(traffic.received))
    return sort_by_expert(ids_S[:, None], num_local)


def exchange_rows(x_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, *, name: str) -> Tensor:
    """Exchange uneven numbers of rows, without a gradient: ``send_to_experts`` and ``send_back`` have one.

    Args:
        x_RD: Rows, those for rank 0 first.
        sent: Rows to each rank.
        received: Rows from each rank.
        group: Ranks that take part.
        name: For profilers.

    Collective: the group.
    """
    x_SD = x_RD.new_empty(sum(received), *x_RD.shape[1:])
    with record_function(f"{WHOLE} {name}"):
        dist.all_to_all_single(x_SD, x_RD.contiguous(), received, sent, group=group)
    return x_SD


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        is_kept: bool,
        name: str,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group, ctx.name = sent, received, group, name
        if not is_kept:
            return exchange_rows(x_RD, sent, received, group, name=name)
        # What is kept is handed out again and again, so each time as a tensor of its own for autograd to mark.
        return keep(lambda: exchange_rows(x_RD, sent, received, group, name=name)).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        grad_RD = exchange_rows(grads[0], ctx.received, ctx.sent, ctx.group, name=f"{ctx.name}, back")
        return grad_RD, None, None, None, None, None
