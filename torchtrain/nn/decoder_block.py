"""The pre-norm residual block of every family: the unit of FSDP, activation checkpointing and compile.

Shape legend: B = batch, T = tokens, D = hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from torchtrain.nn.attention import Attention
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RotaryTable


class DecoderBlock(nn.Module):
    """Attention, then a feed-forward layer, each on a normalised input and added to the residual stream.

    Attributes carry the names of Hugging Face's checkpoints.
    """

    def __init__(
        self, *, self_attn: Attention, mlp: nn.Module, input_layernorm: RMSNorm, post_attention_layernorm: RMSNorm
    ) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    def forward(self, x_BTD: Tensor, rope: RotaryTable, mask: Tensor | None) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x_BTD: The residual stream before it.
            rope: This batch's rotary table.
            mask: What the attention core's ``build_mask`` returned.
        """
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, mask)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
