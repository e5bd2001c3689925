"""Seeds: one number in the job, and as many independent ones as needed derived from it.

Importing this file imports no torch, so that ``derive_seed`` is at hand for code that has none.
"""

from __future__ import annotations

import hashlib
import random

from torchtrain.runtime.env import set_env_default


def derive_seed(seed: int, *parts: str | int) -> int:
    """Derive a 64-bit seed from a seed and the name of what it is for.

    The same on every machine, Python and release: a hash of the words, never Python's salted ``hash``.
    """
    words = "\x1f".join(repr(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, numpy and torch (every device)."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(seed)


def set_deterministic(enabled: bool) -> None:
    """Have torch run deterministic kernels only, and fail where an op has none."""
    import torch

    if enabled:
        # cuBLAS is deterministic only with a fixed workspace, and reads this at its first use.
        # Source: PyTorch documentation, "Reproducibility".
        set_env_default("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enabled)
