"""Newton-Schulz orthogonalisation of matrices, alone or in batches.

Shape legend: K matrices, M rows, N columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

# Chosen for the steepest slope at zero: five steps bring singular values into about [0.7, 1.2] rather than to 1.
# Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-7
# Small matrices share the launches of a batch; large ones fill a device alone, and a batch would only cost memory.
_MAX_BATCH_ELEMENTS = 2**24


def orthogonalize(matrices_KMN: Tensor, *, steps: int) -> Tensor:
    """Bring all singular values of each matrix near 1, keeping its singular vectors.

    Args:
        matrices_KMN: One matrix, or a batch; left alone.
        steps: Iterations.

    Numerics: in the dtype of the input. The first division bounds the spectral norm by the Frobenius norm. A matrix of
        zeros stays one.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices_KMN.shape[-2] > matrices_KMN.shape[-1]
    x = matrices_KMN.mT if is_tall else matrices_KMN
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def orthogonalize_all(matrices: Sequence[Tensor], *, steps: int) -> list[Tensor]:
    """Orthogonalise matrices of any shapes, those of one shape in batches."""
    by_shape: dict[torch.Size, list[int]] = defaultdict(list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    results: dict[int, Tensor] = {}
    for shape, indices in by_shape.items():
        size = max(1, _MAX_BATCH_ELEMENTS // shape.numel())
        for start in range(0, len(indices), size):
            chosen = indices[start : start + size]
            if len(chosen) == 1:
                batch = orthogonalize(matrices[chosen[0]], steps=steps).unsqueeze(0)
            else:
                batch = orthogonalize(torch.stack([matrices[index] for index in chosen]), steps=steps)
            results |= dict(zip(chosen, batch.unbind(), strict=True))
    return [results[index] for index in range(len(matrices))]


def orthogonalization_cost(rows: int, columns: int) -> int:
    """What a step costs, up to a factor: three products of the matrix with a square one of its shorter side."""
    return rows * columns * min(rows, columns)
