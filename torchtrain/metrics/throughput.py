"""Model FLOPs utilisation, the one definition of it.

FLOPs are those the model needs (``nn.flops``: forward and backward, no recomputation), so that activation checkpointing
lowers MFU instead of flattering it. The peak is the device's dense bf16 rate whatever dtype the run computes in.
"""

from __future__ import annotations


def mfu(
    tokens_per_second: float, *, flops_per_token: float, peak_flops: float | None, num_devices: int
) -> float | None:
    """Compute MFU = tokens/s x FLOPs/token / (devices x peak FLOP/s).

    Args:
        tokens_per_second: Over all ranks.
        flops_per_token: Training FLOPs of one token.
        peak_flops: FLOP/s of one device; ``None`` where unknown.
        num_devices: Devices of the run.

    Returns:
        A share of 1, or ``None`` where the peak is unknown.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    if peak_flops is None:
        return None
    return tokens_per_second * flops_per_token / (num_devices * peak_flops)
