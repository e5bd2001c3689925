"""A polite stop: SIGTERM and SIGINT are noted, and the loop leaves when its step is whole."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class StopSignal:
    """Records the first SIGTERM or SIGINT while the context is open. Main thread only.

    A second SIGINT interrupts as usual, for someone who does not want to wait.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._previous: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> Self:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._record)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(signum)
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
