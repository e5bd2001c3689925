"""What the trainer says about a step or an evaluation. Plain numbers, already reduced over ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports torch
    from torchtrain.nn.load_balance import LoadReport


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step."""

    step: int
    """Counted from 1: the number of steps done."""
    loss: float
    """Global token mean; NaN for a step without a valid label, which changes nothing."""
    grad_norm: float
    """Before clipping; NaN where the loss is."""
    lr: float
    """Learning rate this step was taken with."""
    tokens_per_second: float
    """Positions computed per second, over all ranks: what the hardware does, padding and masked labels included."""
    tokens_seen: int
    """Valid labels learned from, over all ranks, since the first step of the run."""
    step_time_s: float
    """Wall time of the step, data wait included."""
    data_wait_s: float
    """Part of it spent waiting for batches."""
    peak_memory_bytes: int
    """Of one rank; see ``runtime.device.peak_memory_bytes``."""
    mfu: float | None = None
    """Share of the devices' peak, 0 to 1; see ``metrics.throughput``. ``None`` where the peak is unknown."""
    loss_by_source: dict[str, float] = field(default_factory=dict)
    """Token mean per dataset source; reported where there are several."""
    expert_loads: dict[str, LoadReport] = field(default_factory=dict)
    """How evenly experts were used, by the fqn of the layer's router; empty without experts."""


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """One evaluation on held-out sequences."""

    step: int
    """Steps done before it."""
    loss: float
    """Global token mean."""
    tokens: int
    """Valid labels it was taken over."""
    time_s: float
    """Wall time."""
