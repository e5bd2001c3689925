"""Sections ``optimizer`` and ``lr_scheduler``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """The optimizer and its parameter groups."""

    target: Annotated[str, Field(alias="_target_")] = "torch.optim.AdamW"
    """``torchtrain.optim.muon.Muon`` or a class of ``torch.optim`` (not SparseAdam, LBFGS, Adafactor, Rprop, and not
    its Muon); others need the job's ``trusted_targets``."""
    lr: float = 3e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Moment decay rates."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    no_decay: tuple[str, ...] = ("*norm.weight", "*.bias")
    """Fqn patterns that get no weight decay."""
    fused: bool | None = None
    """One kernel for the whole step; null where the device and the class have it, on sharded parameters AdamW and
    Adam."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class. ``torchtrain.optim.muon.Muon`` takes ``adamw_params``, fqn patterns of
    what AdamW steps (embeddings, heads, norms, biases unless told), ``adamw_lr`` (``lr`` unless told), ``momentum``,
    ``nesterov``, ``ns_steps`` and ``ns_dtype``."""
    fp32_main_params: bool = False
    """Step fp32 copies of low-precision parameters; goes with ``mix_precision.fp32_main_grad``."""


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig(Section):
    """Warmup, then a shape."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape after warmup. ``wsd``: stable, then a linear decay over the last ``decay_steps``."""
    warmup_steps: int = 0
    """Steps of linear warmup from 0."""
    decay_steps: int | None = None
    """wsd: length of the final decay; null is a tenth of the run."""
    min_lr_ratio: float = 0.1
    """Final learning rate over the peak."""
