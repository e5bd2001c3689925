"""How far two results are apart, as one number."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(actual: Tensor | float, expected: Tensor | float) -> float:
    """Measure the distance of two results relative to the expected one.

    Args:
        actual: The result under test; whole tensors, never shards.
        expected: The reference, of the same shape.

    Returns:
        ``|actual - expected| / |expected|`` in the 2-norm. Where the reference is all zeros, the absolute distance.
        NaN or infinity on either side gives infinity, so that no tolerance lets it pass.

    Numerics:
        In fp64. One norm per tensor rather than a maximum over elements: elements near zero carry rounding of the sums
        they came from, which says nothing about the tensor.
    """
    actual_64 = torch.as_tensor(actual).detach().to("cpu", torch.float64)
    expected_64 = torch.as_tensor(expected).detach().to("cpu", torch.float64)
    if actual_64.shape != expected_64.shape:
        raise ValueError(f"shapes differ: {tuple(actual_64.shape)} against {tuple(expected_64.shape)}")
    distance = torch.linalg.vector_norm(actual_64 - expected_64).item()
    size = torch.linalg.vector_norm(expected_64).item()
    error = distance / size if size > 0 else distance
    return error if error < float("inf") else float("inf")
