"""One answer for all ranks to a signal that may have reached any of them.

Not for hearing it: that is ``runtime.signals``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchtrain.distributed.process_group import sum_over
from torchtrain.runtime.signals import StopSignal

ShouldStop = Callable[[], bool]
"""Asked between two pieces of work that are collective, by every rank equally often."""


def is_any_rank_told_to_stop(stop_signal: StopSignal) -> bool:
    """Tell whether a signal has reached this rank or another.

    Collective: the whole world, one small all-reduce on the CPU.
    """
    (stops,) = sum_over([float(stop_signal.received is not None)], None, torch.device("cpu"))
    return stops > 0
