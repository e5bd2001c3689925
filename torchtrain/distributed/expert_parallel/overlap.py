"""Exchanges in two halves, start and finish, so that other work fits in between: in forward and in backward.

Each half is a node of the autograd graph. Backward of ``finish`` starts the reverse exchange and backward of ``start``
waits for it. Autograd runs, of the nodes that are ready, the one made last; so a dispatcher that puts work between
the halves in forward gets the mirror image of that order in backward, and the same order on every rank.

Shape legend: R = rows sent, S = rows received, D = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from torchtrain.nn.recomputation import keep
from torchtrain.runtime.device import SideStream, side_stream

START, FINISH = "expert_exchange::start", "expert_exchange::finish"
"""Labels for profilers, followed by the name of the exchange."""


class Route(Protocol):
    """Who gets how many rows from whom, one way; ``reversed`` is the other way."""

    @property
    def name(self) -> str:
        """For labels."""
        ...

    def post(self, x_RD: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Begin to send ``x_RD``; returns where ``x_SD`` is going to be, and what to wait for."""
        ...

    def reversed(self) -> Route:
        """The way back."""
        ...


@dataclass(frozen=True)
class AllRoute:
    """With every rank of the group at once."""

    name: str
    group: dist.ProcessGroup
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    """Rows from each rank."""

    def post(self, x_RD: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """See ``Route``.

        Collective: the group.
        """
        x_SD = x_RD.new_empty(sum(self.received), *x_RD.shape[1:])
        work = dist.all_to_all_single(x_SD, x_RD, self.received, self.sent, group=self.group, async_op=True)
        return x_SD, [cast(dist.Work, work)]

    def reversed(self) -> AllRoute:
        """See ``Route``."""
        return AllRoute(f"{self.name}, back", self.group, self.received, self.sent)


@dataclass(frozen=True)
class PeerRoute:
    """To one rank, and from one rank: those that stand equally far ahead and behind."""

    name: str
    group: dist.ProcessGroup
    to: int
    """Rank in the group that rows go to."""
    source: int
    """Rank in the group that rows come from."""
    num_sent: int
    num_received: int

    def post(self, x_RD: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """See ``Route``; no rows, no message.

        Collective: the ranks at both ends.
        """
        x_SD = x_RD.new_empty(self.num_received, *x_RD.shape[1:])
        messages = []
        if self.num_sent:
            messages.append(dist.P2POp(dist.isend, x_RD, group=self.group, group_peer=self.to))
        if self.num_received:
            messages.append(dist.P2POp(dist.irecv, x_SD, group=self.group, group_peer=self.source))
        return x_SD, dist.batch_isend_irecv(messages) if messages else []

    def reversed(self) -> PeerRoute:
        """See ``Route``."""
        return PeerRoute(f"{self.name}, back", self.group, self.source, self.to, self.num_received, self.num_sent)


class Exchange:
    """One exchange, there in forward and back in backward; used once.

    Args:
        route: The way there.
        is_kept: Whether a recomputation takes what was received the first time.
    """

    def __init__(self, route: Route, *, is_kept: bool) -> None:
        self._route = route
        self._is_kept = is_kept
        self._pending: _Pending | None = None
        self._received: Tensor | None = None

    def start(self, x_RD: Tensor) -> Tensor:
        """Begin to send; returns a ticket for ``finish``, an empty tensor that carries the graph."""
        return cast(Tensor, _Start.apply(x_RD, self))

    def finish(self, ticket: Tensor) -> Tensor:
        """Wait for the rows of the others; returns ``x_SD``."""
        return cast(Tensor, _Finish.apply(ticket, self))

    def begin_there(self, x_RD: Tensor) -> None:
        """Post the way there, unless this is a recomputation of one whose result was kept."""
        self._received = keep(lambda: self._post(self._route, x_RD)) if self._is_kept else self._post(self._route, x_RD)

    def begin_back(self, grad_SD: Tensor) -> None:
        """Post the way back."""
        self._received = self._post(self._route.reversed(), grad_SD)

    def end(self, *, is_back: bool) -> Tensor:
        """Wait for what was posted last, if anything was; returns what it brought."""
        route = self._route.reversed() if is_back else self._route
        with record_function(f"{FINISH} {route.name}"):
            if self._pending is not None:
                self._pending.wait()
        received, self._pending, self._received = self._received, None, None
        assert received is not None, f"{route.name} was never started"
        return received

    def _post(self, route: Route, x_RD: Tensor) -> Tensor:
        with record_function(f"{START} {route.name}"):
            self._pending = _Pending.post(route, x_RD.contiguous())
            return self._pending.written


@dataclass(frozen=True)
class _Pending:
    """An exchange under way, and what it reads and writes, alive until its end."""

    works: list[dist.Work]
    read: Tensor
    written: Tensor
    stream: SideStream | None = None
    event: torch.Event | None = None

    @classmethod
    def post(cls, route: Route, x_RD: Tensor) -> _Pending:
        stream = side_stream(x_RD.device)
        if stream is None:
            x_SD, works = route.post(x_RD)
            return cls(works, x_RD, x_SD)
        with stream.entered(reading=x_RD):
            x_SD, works = route.post(x_RD)
            for work in works:
                work.wait()  # The side stream waits, nobody else.
            return cls([], x_RD, x_SD, stream, stream.record_event())

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.stream is not None and self.event is not None:
            self.stream.join(self.event, written=self.written)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.begin_there(x_RD)
        return x_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return ctx.exchange.end(is_back=True), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        # What is kept is handed out again and again, so each time as a tensor of its own for autograd to mark.
        return exchange.end(is_back=False).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        ctx.exchange.begin_back(grads[0])
        return grads[0].new_empty(0), None
