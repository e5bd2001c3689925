"""The pre-norm residual block of every family: the unit of FSDP, activation checkpointing and compile.

Shape legend: B = batch, T = tokens, D = hidden size.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from torchtrain.nn.attention import Attention
from torchtrain.nn.gated_delta_net import GatedDeltaNet
from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RotaryTable


class DecoderBlock(nn.Module):
    """A token mixer, then a feed-forward layer, each on a normalised input and added to the residual stream.

    Attributes carry the names of Hugging Face's checkpoints.
    """

    def __init__(
        self,
        *,
        mlp: nn.Module,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        self_attn: Attention | None = None,
        linear_attn: GatedDeltaNet | None = None,
    ) -> None:
        super().__init__()
        if (self_attn is None) == (linear_attn is None):
            raise ValueError("a block mixes tokens in one way")
        self.self_attn = self_attn
        self.linear_attn = linear_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    @property
    def mixer(self) -> Attention | GatedDeltaNet:
        """How tokens see each other."""
        return cast(GatedDeltaNet, self.linear_attn) if self.self_attn is None else self.self_attn

    def forward(self, x_BTD: Tensor, rope: RotaryTable, mask: Tensor | None) -> Tensor:
        """Return the residual stream after this block.

        Args:
            x_BTD: The residual stream before it.
            rope: This batch's rotary table.
            mask: What ``build_mask`` of the mixer's core returned.
        """
        x_BTD = x_BTD + self.mixer(self.input_layernorm(x_BTD), rope, mask)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
