"""A dense decoder in the plainest torch that computes it: the oracle for Llama-like families and dense Qwen3.

Written for reading, not for speed: one head, one query, one sum at a time where that is clearer. It shares no line with
what it judges. Parameter names are Hugging Face's without the leading ``model.``, so state dicts load either way.

Shape legend: B = batch, T = tokens, D = hidden size, H = head dim, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ReferenceConfig:
    """Sizes, in Hugging Face's words; ``rope_scaling`` is the mapping found in ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    attention_bias: bool
    tie_word_embeddings: bool
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    """Biases on queries, keys and values, and none on the way out."""


class ReferenceNorm(nn.Module):
    """Divide by the root of the mean square, multiply by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        mean_square = (x * x).sum(dim=-1, keepdim=True) / x.shape[-1]
        return self.weight * (x / torch.sqrt(mean_square + self.eps))


class ReferenceAttention(nn.Module):
    """Softmax attention, one head after the other."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        has_bias_in = config.attention_bias or config.has_qkv_bias
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=has_bias_in)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=has_bias_in)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=has_bias_in)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        if config.has_qk_norm:
            self.q_norm = ReferenceNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = ReferenceNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, angles_BTH: Tensor, allowed_BTT: Tensor) -> Tensor:
        """Attend where ``allowed_BTT`` (query, key) is true."""
        size = self.config.head_dim
        queries = self.q_proj(x_BTD).split(size, dim=-1)
        keys = self.k_proj(x_BTD).split(size, dim=-1)
        values = self.v_proj(x_BTD).split(size, dim=-1)
        if self.config.has_qk_norm:
            queries = [self.q_norm(query_BTH) for query_BTH in queries]
            keys = [self.k_norm(key_BTH) for key_BTH in keys]
        queries_per_key = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head in range(self.config.num_attention_heads):
            shared = head // queries_per_key
            query_BTH = rotate(queries[head], angles_BTH)
            key_BTH = rotate(keys[shared], angles_BTH)
            scores_BTT = query_BTH @ key_BTH.transpose(1, 2) / math.sqrt(size)
            scores_BTT = torch.where(allowed_BTT, scores_BTT, torch.tensor(float("-inf"), dtype=scores_BTT.dtype))
            weights_BTT = torch.exp(scores_BTT - scores_BTT.max(dim=-1, keepdim=True).values)
            weights_BTT = weights_BTT / weights_BTT.sum(dim=-1, keepdim=True)
            heads.append(weights_BTT @ values[shared])
        return self.o_proj(torch.cat(heads, dim=-1))


class ReferenceFeedForward(nn.Module):
    """SwiGLU, with the sigmoid written out."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Gate, multiply, project down."""
        gate = self.gate_proj(x_BTD)
        return self.down_proj(gate / (1 + torch.exp(-gate)) * self.up_proj(x_BTD))


class ReferenceLayer(nn.Module):
    """Attention and feed-forward, each added to what came in."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.self_attn = ReferenceAttention(config)
        self.mlp: nn.Module = ReferenceFeedForward(config.hidden_size, config.intermediate_size)
        self.input_layernorm = ReferenceNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ReferenceNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, angles_BTH: Tensor, allowed_BTT: Tensor) -> Tensor:
        """Return the sum after both."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), angles_BTH, allowed_BTT)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class ReferenceDecoder(nn.Module):
    """The whole model."""

    def __init__(self, config: ReferenceConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ReferenceLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = ReferenceNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, input_ids_BT: Tensor, positions_BT: Tensor | None = None, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Compute ``logits_BTV``; positions default to counting, documents to one per row."""
        if positions_BT is None:
            positions_BT = torch.arange(input_ids_BT.shape[1]).expand_as(input_ids_BT)
        if document_ids_BT is None:
            document_ids_BT = torch.zeros_like(input_ids_BT)
        angles_BTH = rotary_angles(positions_BT, self.config, dtype=self.embed_tokens.weight.dtype)
        allowed_BTT = allowed_pairs(document_ids_BT)
        x_BTD = self.embed_tokens(input_ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, angles_BTH, allowed_BTT)
        return self.lm_head(self.norm(x_BTD))


def allowed_pairs(document_ids_BT: Tensor) -> Tensor:
    """Say for every query and key of a row whether the key may be seen: same document, not later."""
    batch, tokens = document_ids_BT.shape
    allowed_BTT = torch.zeros(batch, tokens, tokens, dtype=torch.bool)
    for row in range(batch):
        for query in range(tokens):
            for key in range(query + 1):
                allowed_BTT[row, query, key] = document_ids_BT[row, query] == document_ids_BT[row, key]
    return allowed_BTT


def rotary_angles(positions_BT: Tensor, config: ReferenceConfig, dtype: torch.dtype) -> Tensor:
    """Compute the angle of every position and head coordinate; coordinates i and i + H/2 share one."""
    frequencies = []
    for pair in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * pair / config.head_dim)
        frequencies.append(stretched(frequency, config.rope_scaling) if config.rope_scaling else frequency)
    return positions_BT[:, :, None].to(dtype) * torch.tensor(frequencies * 2, dtype=dtype)


def stretched(frequency: float, scaling: dict) -> float:
    """Apply Llama 3.1's frequency scaling: long waves stretch, short ones stay, those between blend."""
    wavelength = 2 * math.pi / frequency
    context = scaling["original_max_position_embeddings"]
    if wavelength > context / scaling["low_freq_factor"]:
        return frequency / scaling["factor"]
    if wavelength < context / scaling["high_freq_factor"]:
        return frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (context / wavelength - low) / (high - low)
    return (1 - share) * frequency / scaling["factor"] + share * frequency


def rotate(x_BTH: Tensor, angles_BTH: Tensor) -> Tensor:
    """Turn each pair (i, i + H/2) of a head by its angle."""
    half = x_BTH.shape[-1] // 2
    first, second = x_BTH[..., :half], x_BTH[..., half:]
    cos, sin = torch.cos(angles_BTH[..., :half]), torch.sin(angles_BTH[..., :half])
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
