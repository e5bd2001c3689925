"""Root-mean-square normalisation.

Shape legend: D = hidden size; ``x`` may have any leading dims.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.kernels.rms_norm import RMSNormKernel, torch_rms_norm


class RMSNorm(nn.Module):
    """Scale each vector to unit root mean square, then by a learned weight.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.

    Numerics:
        Statistics, division and weight are applied in fp32, one rounding at the end, whatever the input's dtype.
        Hugging Face's Llama rounds before the weight too; in fp32 both agree.

    Attributes:
        kernel: The backend in use; replace it to install another.
        offset: Added to the weight.
    """

    offset = 0.0

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.kernel: RMSNormKernel = torch_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim; the result has the input's dtype."""
        return self.kernel(x, self.weight, self.eps, offset=self.offset)

    def extra_repr(self) -> str:
        """Show size and epsilon in ``print(model)``."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ZeroCentredRMSNorm(RMSNorm):
    """An ``RMSNorm`` that scales by one plus its weight, so that weight decay pulls the scale to one."""

    offset = 1.0


class GatedRMSNorm(RMSNorm):
    """An ``RMSNorm`` whose result is multiplied by the SiLU of a gate.

    Numerics:
        All of it in fp32, one rounding at the end.
    """

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        """Normalise the last dim and let through what the gate, of the same shape, says."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        normal = self.kernel(x.to(dtype), self.weight, self.eps, offset=self.offset)
        return (normal * F.silu(gate.to(dtype))).to(x.dtype)
