"""Section ``kernel_config``: which backend computes an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class KernelConfig(Section):
    """Kernel plugins. What was chosen is logged once, and stands in the run's ``job.yaml`` and ``kernels.json``."""

    name: str = "auto"
    """Comma-separated: ``auto`` (what torch ships, picked per device), ``flash-linear-attention``, ``liger-kernel``. A
    named plugin must be installed and able."""
    include_kernels: str | None = None
    """Comma-separated ops to take from the named plugins; null is all of theirs."""
    chunk_size: Literal[16, 32, 64] = 64
    """Chunk of the gated delta rule, in tokens."""
