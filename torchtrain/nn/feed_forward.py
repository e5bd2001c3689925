"""The gated feed-forward layer.

Shape legend: B = batch, T = tokens, D = hidden size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``.

    Source: Shazeer 2020, "GLU Variants Improve Transformer", equation 6.
    """

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return ``out_BTD``."""
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
