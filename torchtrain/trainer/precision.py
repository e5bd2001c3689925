"""Compute precision where no FSDP unit casts parameters: autocast honours ``param_dtype`` instead."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchtrain.config.fsdp import MixPrecisionConfig
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)


class ComputePrecision:
    """The context in which forward passes run."""

    def __init__(self, config: MixPrecisionConfig, device: torch.device, *, has_fsdp_domain: bool) -> None:
        self._device_type = device.type
        self.autocast_dtype: torch.dtype | None = None
        if has_fsdp_domain or config.param_dtype in (None, "float32"):
            return
        self.autocast_dtype = torch.bfloat16 if config.param_dtype == "bfloat16" else torch.float16
        logger.info(f"no FSDP domain: param_dtype {config.param_dtype} is honoured by autocast")

    def forward_context(self) -> AbstractContextManager[Any]:
        """A fresh context for one forward pass."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self._device_type, dtype=self.autocast_dtype)
