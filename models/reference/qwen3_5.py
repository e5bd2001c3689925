"""Qwen3.5's text side, dense or with experts, in the plainest torch that computes it: the delta rule token by token.

Written for reading, not for speed; shares no line with what it judges. Experts are those of ``moe``. Parameters have
Hugging Face's names without the leading ``model.``, but for the experts.

Shape legend: B = batch, T = tokens, D = hidden size, H = head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.reference.dense import ReferenceFeedForward, allowed_pairs, rotate
from models.reference.moe import ReferenceMoE, ReferenceMoEConfig


@dataclass(frozen=True)
class ReferenceHybridConfig:
    """Sizes, in Hugging Face's words."""

    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    intermediate_size: int
    """Of layers without experts."""
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool


class CentredNorm(nn.Module):
    """Divide by the root of the mean square, multiply by one plus a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * (1 + self.weight)


class PlainNorm(nn.Module):
    """Divide by the root of the mean square, multiply by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps) * self.weight


def silu(x: Tensor) -> Tensor:
    """Write SiLU out."""
    return x / (1 + torch.exp(-x))


class ReferenceDeltaNet(nn.Module):
    """One head after the other, one token after the other."""

    def __init__(self, config: ReferenceHybridConfig) -> None:
        super().__init__()
        self.config = config
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        heads, hidden_size = config.linear_num_value_heads, config.hidden_size
        self.in_proj_qkv = nn.Linear(hidden_size, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, values, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, heads, bias=False)
        channels, width = 2 * keys + values, config.linear_conv_kernel_dim
        self.conv1d = nn.Conv1d(channels, channels, width, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = PlainNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(values, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, document_ids_BT: Tensor) -> Tensor:
        """Return ``out_BTD``; state and convolution begin anew with every document."""
        rows = []
        for x_TD, ids in zip(x_BTD, document_ids_BT.tolist(), strict=True):
            starts = [t for t in range(len(ids)) if t == 0 or ids[t] != ids[t - 1]]
            ends = [*starts[1:], len(ids)]
            rows.append(torch.cat([self._one_document(x_TD[a:b]) for a, b in zip(starts, ends, strict=True)]))
        return torch.stack(rows)

    def _one_document(self, x_TD: Tensor) -> Tensor:
        mixed, filters = self.in_proj_qkv(x_TD), self.conv1d.weight[:, 0]
        width = filters.shape[1]
        convolved = []
        for token in range(len(x_TD)):
            taps = [filters[:, width - 1 - d] * mixed[token - d] for d in range(width) if token - d >= 0]
            convolved.append(silu(torch.stack(taps).sum(dim=0)))
        gates, betas = self.in_proj_z(x_TD), self.in_proj_b(x_TD)
        steps = torch.log(1 + torch.exp(self.in_proj_a(x_TD) + self.dt_bias))
        decays = torch.exp(-torch.exp(self.A_log) * steps)
        heads = [
            self._one_head(head, convolved, decays[:, head], 1 / (1 + torch.exp(-betas[:, head])), gates)
            for head in range(self.config.linear_num_value_heads)
        ]
        return self.out_proj(torch.cat(heads, dim=-1))

    def _one_head(self, head: int, convolved: list[Tensor], decays: Tensor, betas: Tensor, gates: Tensor) -> Tensor:
        config = self.config
        key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
        key_head = head // (config.linear_num_value_heads // config.linear_num_key_heads)
        keys_start = config.linear_num_key_heads * key_size
        of_key = slice(key_head * key_size, (key_head + 1) * key_size)
        of_value = slice(head * value_size, (head + 1) * value_size)
        state = torch.zeros(key_size, value_size, dtype=gates.dtype)
        outs = []
        for token, mixed in enumerate(convolved):
            query = unit(mixed[:keys_start][of_key]) / math.sqrt(key_size)
            key = unit(mixed[keys_start : 2 * keys_start][of_key])
            value = mixed[2 * keys_start :][of_value]
            state = decays[token] * state
            state = state + betas[token] * torch.outer(key, value - key @ state)
            outs.append(query @ state)
        return self.norm(torch.stack(outs)) * silu(gates[:, of_value])


def unit(x: Tensor) -> Tensor:
    """Scale to length one."""
    return x / torch.sqrt((x * x).sum() + 1e-6)


class ReferenceGatedAttention(nn.Module):
    """Softmax attention with a gate on each head's output, one head after the other."""

    def __init__(self, config: ReferenceHybridConfig) -> None:
        super().__init__()
        self.config = config
        size, heads, shared = config.head_dim, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, 2 * heads * size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared * size, bias=False)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)
        self.q_norm = CentredNorm(size, config.rms_norm_eps)
        self.k_norm = CentredNorm(size, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, angles_BTH: Tensor, allowed_BTT: Tensor) -> Tensor:
        """Attend where ``allowed_BTT`` (query, key) is true."""
        size = self.config.head_dim
        queries_and_gates = self.q_proj(x_BTD).split(size, dim=-1)
        keys, values = self.k_proj(x_BTD).split(size, dim=-1), self.v_proj(x_BTD).split(size, dim=-1)
        queries_per_key = self.config.num_attention_heads // self.config.num_key_value_heads
        heads = []
        for head in range(self.config.num_attention_heads):
            query = rotate_first(self.q_norm(queries_and_gates[2 * head]), angles_BTH)
            key = rotate_first(self.k_norm(keys[head // queries_per_key]), angles_BTH)
            scores_BTT = query @ key.transpose(1, 2) / math.sqrt(size)
            weights_BTT = torch.softmax(scores_BTT.masked_fill(~allowed_BTT, -math.inf), dim=-1)
            gate = 1 / (1 + torch.exp(-queries_and_gates[2 * head + 1]))
            heads.append(weights_BTT @ values[head // queries_per_key] * gate)
        return self.o_proj(torch.cat(heads, dim=-1))


def rotate_first(x_BTH: Tensor, angles: Tensor) -> Tensor:
    """Turn as many values of a head as there are angles, and leave the rest."""
    count = angles.shape[-1]
    return torch.cat([rotate(x_BTH[..., :count], angles), x_BTH[..., count:]], dim=-1)


class ReferenceHybridLayer(nn.Module):
    """A mixer of tokens and a feed-forward part, each added to what came in."""

    def __init__(self, config: ReferenceHybridConfig, experts: ReferenceMoEConfig | None, kind: str) -> None:
        super().__init__()
        if kind == "full_attention":
            self.self_attn = ReferenceGatedAttention(config)
        else:
            self.linear_attn = ReferenceDeltaNet(config)
        self.kind = kind
        if experts is None:
            self.mlp: nn.Module = ReferenceFeedForward(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = ReferenceMoE(config.hidden_size, experts)
        self.input_layernorm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CentredNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, angles: Tensor, document_ids_BT: Tensor) -> Tensor:
        """Return the sum after both."""
        normal_BTD = self.input_layernorm(x_BTD)
        if self.kind == "full_attention":
            x_BTD = x_BTD + self.self_attn(normal_BTD, angles, allowed_pairs(document_ids_BT))
        else:
            x_BTD = x_BTD + self.linear_attn(normal_BTD, document_ids_BT)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class ReferenceHybridDecoder(nn.Module):
    """The whole model, dense where there are no experts."""

    def __init__(self, config: ReferenceHybridConfig, experts: ReferenceMoEConfig | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([ReferenceHybridLayer(config, experts, kind) for kind in config.layer_types])
        self.norm = CentredNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, input_ids_BT: Tensor, positions: Tensor | None = None, document_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Compute ``logits_BTV``; positions, ``[B, T]`` or ``[axes, B, T]``, default to counting."""
        if positions is None:
            positions = torch.arange(input_ids_BT.shape[1]).expand_as(input_ids_BT)
        if document_ids_BT is None:
            document_ids_BT = torch.zeros_like(input_ids_BT)
        angles = self._angles(positions if positions.ndim == 3 else positions.expand(3, -1, -1))
        x_BTD = self.embed_tokens(input_ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, angles, document_ids_BT)
        return self.lm_head(self.norm(x_BTD))

    def _angles(self, positions_ABT: Tensor) -> Tensor:
        size = int(self.config.head_dim * self.config.partial_rotary_factor)
        columns = []
        for pair in range(size // 2):
            axis = pair % 3
            if pair // 3 >= self.config.mrope_section[axis]:
                axis = 0
            columns.append(positions_ABT[axis].float() * self.config.rope_theta ** (-2 * pair / size))
        return torch.stack(columns * 2, dim=-1)
