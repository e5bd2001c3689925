"""Causal self-attention with grouped key/value heads, and the part of it that techniques replace.

Shape legend: B = batch, T = tokens, D = hidden size, N = query heads, K = key/value heads, H = head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.nn.rms_norm import RMSNorm
from torchtrain.nn.rope import RotaryTable


class AttentionCore(Protocol):
    """What happens between the projections; context parallelism installs its own."""

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Build once per forward what every layer's call needs to keep documents apart."""
        ...

    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend causally; returns ``out_BTNH``."""
        ...


class SDPACore:
    """Attention over the whole local sequence by torch's ``scaled_dot_product_attention``."""

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Allow a token to see itself and earlier tokens of its document; ``None`` means plain causal.

        Args:
            document_ids_BT: Integer ids, equal inside a document; ``None`` where a row is one document.

        Returns:
            Boolean ``mask_B1TT``, true where attention is allowed. One byte per pair and row: at 32k tokens 1 GiB.
        """
        if document_ids_BT is None:
            return None
        same_document_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
        return same_document_BTT.tril_()[:, None]

    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see ``AttentionCore``."""
        q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        if mask is None:
            out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
        else:
            # Of the accelerator kernels that avoid a T x T score matrix, those that take a mask want equal head counts.
            group = q_BNTH.shape[1] // k_BKTH.shape[1]
            k_BNTH, v_BNTH = (x.repeat_interleave(group, dim=1) for x in (k_BKTH, v_BKTH))
            out_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=mask)
        return out_BNTH.transpose(1, 2)


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of one attention layer."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention_bias: bool = False
    """On all four projections."""
    has_qkv_bias: bool = False
    """On the three that project in, whatever ``attention_bias`` says."""
    qk_norm_eps: float | None = None
    """Normalise each query and key head before rotation; ``None`` leaves them as they are."""
    qk_norm: type[RMSNorm] = RMSNorm
    has_output_gate: bool = False
    """Multiply each head's output by a sigmoid of the input; ``q_proj`` holds each head's gate after its query."""


class Attention(nn.Module):
    """Project, rotate, attend, project back.

    Source: Ainslie et al. 2023, "GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints";
        norms of queries and keys: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters", section
        2; output gate: Qiu et al. 2025, "Gated Attention for Large Language Models".

    Attributes:
        core: The ``AttentionCore`` in use; replace it to install another.
    """

    def __init__(self, config: AttentionConfig, core: AttentionCore) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.core = core
        query_size = config.num_attention_heads * config.head_dim
        key_value_size = config.num_key_value_heads * config.head_dim
        self.has_output_gate = config.has_output_gate
        width = 2 * query_size if config.has_output_gate else query_size
        has_qkv_bias = config.attention_bias or config.has_qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, width, bias=has_qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_value_size, bias=has_qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_value_size, bias=has_qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm, self.k_norm = None, None
        if config.qk_norm_eps is not None:
            self.q_norm = config.qk_norm(config.head_dim, config.qk_norm_eps)
            self.k_norm = config.qk_norm(config.head_dim, config.qk_norm_eps)

    def forward(self, x_BTD: Tensor, rope: RotaryTable, mask: Tensor | None) -> Tensor:
        """Return ``out_BTD``."""
        # Head counts are read off the projections' outputs, which may be one rank's share of the heads.
        heads = (-1, self.head_dim)
        q_BTNH, gate_BTNH = self.q_proj(x_BTD), None
        if self.has_output_gate:
            q_BTNH, gate_BTNH = q_BTNH.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        else:
            q_BTNH = q_BTNH.unflatten(-1, heads)
        k_BTKH = self.k_proj(x_BTD).unflatten(-1, heads)
        v_BTKH = self.v_proj(x_BTD).unflatten(-1, heads)
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        out_BTNH = self.core(rope.rotate(q_BTNH), rope.rotate(k_BTKH), v_BTKH, mask)
        if gate_BTNH is not None:
            out_BTNH = out_BTNH * gate_BTNH.sigmoid()
        return self.o_proj(torch.flatten(out_BTNH, start_dim=-2))
