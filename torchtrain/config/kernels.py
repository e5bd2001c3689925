"""Section ``kernel_config``: which backend computes an op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class KernelConfig(Section):
    """Kernel plugins."""

    name: str = "auto"
    """Comma-separated plugins."""
    include_kernels: str | None = None
    """Comma-separated ops to install; null is all of the plugin's."""
    chunk_size: Literal[16, 32, 64] = 64
    """Chunk of the gated delta rule, in tokens."""
