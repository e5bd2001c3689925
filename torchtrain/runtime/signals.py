"""A polite stop: SIGTERM and SIGINT are noted, and the loop leaves when its step is whole."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

EXIT_STOPPED_BY_SIGNAL = 128 + signal.SIGTERM
_STDERR = 2


class StopSignal:
    """Hears SIGTERM and SIGINT while the context is open. Main thread only.

    Until ``defer`` there is nothing to save: a signal ends the process at once with code 143. After it the first one is
    recorded, for the loop to leave in its own time; a second SIGINT interrupts as usual, for someone who does not want
    to wait.
    """

    def __init__(self, speaker: str = "") -> None:
        """Hear nothing yet.

        Args:
            speaker: Who says that a signal came, such as ``[rank 3]``.
        """
        self.received: signal.Signals | None = None
        self._speaker = speaker
        self._previous: dict[signal.Signals, signal._HANDLER] = {}
        self._previous_wakeup = -1
        self._wakeup: int | None = None

    def __enter__(self) -> Self:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._record)
        # Python runs a handler when the main thread is back from C, and a rendezvous is not back for long: what a
        # signal writes into this pipe is read by a thread.
        reader, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup)
        threading.Thread(target=self._leave_when_woken, args=(reader,), name="stop signal", daemon=True).start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.defer()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def defer(self) -> None:
        """From now on a signal waits for the loop. Before any process is forked, which would inherit the pipe."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._previous_wakeup)
            os.close(self._wakeup)
            self._wakeup = None

    def _leave_when_woken(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while number := pipe.read(1):
                if number[0] in self._previous:
                    self._say(signal.Signals(number[0]), "leaving at once, nothing to save yet")
                    os._exit(EXIT_STOPPED_BY_SIGNAL)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        if self._wakeup is not None:
            return
        if self.received is None:
            self.received = signal.Signals(signum)
            self._say(self.received, "saving and leaving after this step, or this batch of an evaluation")
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _say(self, received: signal.Signals, what: str) -> None:
        # Not through logging or print: the signal may have come in the middle of either.
        os.write(_STDERR, f"{self._speaker}{received.name}: {what}\n".encode())
