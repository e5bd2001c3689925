"""The learning rate as a pure function of the step.

No scheduler object: there is nothing to save, and a resumed run cannot disagree with one that never stopped.
"""

from __future__ import annotations

import math

import torch

from torchtrain.config.optimization import LRSchedulerConfig


def lr_at(step: int, config: LRSchedulerConfig, *, peak_lr: float, total_steps: int) -> float:
    """Compute the learning rate of one optimizer step.

    The curve is read at the number of steps done once this one is: the first of ``warmup_steps`` uses
    ``peak_lr / warmup_steps`` rather than a wasted 0, the last of them the peak, and the last step of the run exactly
    ``min_lr_ratio * peak_lr``. Later steps stay there.

    Args:
        step: Step index, from 0.
        config: Section ``lr_scheduler``. A wsd decay longer than what warmup leaves starts right after warmup.
        peak_lr: ``optimizer.lr``.
        total_steps: ``training.steps``.

    Source: Loshchilov & Hutter 2017, "SGDR", equation 5 without restarts (cosine); Hu et al. 2024, "MiniCPM", section 4
        (wsd; the decay here is linear).
    """
    done = step + 1
    if done < config.warmup_steps:
        return peak_lr * done / config.warmup_steps
    decay_start = config.warmup_steps
    if config.name == "wsd":
        decay_steps = max(1, total_steps // 10) if config.decay_steps is None else config.decay_steps
        decay_start = max(decay_start, total_steps - decay_steps)
    progress = min(max(done - decay_start, 0) / max(total_steps - decay_start, 1), 1.0)
    match config.name:
        case "constant":
            remaining = 1.0
        case "linear" | "wsd":
            remaining = 1.0 - progress
        case "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    min_lr = config.min_lr_ratio * peak_lr
    return min_lr + (peak_lr - min_lr) * remaining


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate of this step, times its own ``lr_multiplier`` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_multiplier", 1.0)
