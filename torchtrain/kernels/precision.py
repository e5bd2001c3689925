"""Computing in full precision where the surroundings would lower it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def full_precision(device_type: str) -> AbstractContextManager[Any]:
    """Switch autocast off, on devices that have it."""
    has_autocast = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if has_autocast else nullcontext()
