"""Root-mean-square normalisation.

Shape legend: D = hidden size; ``x`` may have any leading dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.

    Numerics:
        Statistics, division and weight are applied in fp32, one rounding at the end, whatever the input's dtype.
        Hugging Face's Llama rounds before the weight too; in fp32 both agree.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the result has the input's dtype."""
        if self.weight.dtype == x.dtype:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Under autocast fp32 weights meet low-precision activations, a pair torch's fused kernel does not take.
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        """Show size and epsilon in ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
