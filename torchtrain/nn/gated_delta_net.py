"""Linear attention whose state forgets, and the part of it that techniques replace.

Shape legend: B = batch, T = tokens, D = hidden size, K = query/key heads, N = value heads, H = size of a key, V = size
of a value, W = tokens under the convolution, X = channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.kernels.gated_delta_rule import GatedDeltaRule, chunked, recurrent
from torchtrain.nn.rms_norm import GatedRMSNorm
from torchtrain.nn.rope import RotaryTable

_FEW_TOKENS = 8
"""So few that filling a chunk up is more work than going token by token."""


@dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of one layer."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    """A multiple of ``num_key_heads``."""
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    norm_eps: float


@dataclass(frozen=True)
class DeltaNetInputs:
    """What the projections made of the tokens, by head, and the filters of each head's channels."""

    q_BTKH: Tensor
    k_BTKH: Tensor
    v_BTNV: Tensor
    log_decay_BTN: Tensor
    """fp32."""
    beta_BTN: Tensor
    """fp32."""
    q_filter_KHW: Tensor
    k_filter_KHW: Tensor
    v_filter_NVW: Tensor


class DeltaNetCore(Protocol):
    """What happens between the projections; context parallelism installs its own."""

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Build once per forward what every layer's call needs to keep documents apart."""
        ...

    def __call__(self, inputs: DeltaNetInputs, mask: Tensor | None) -> Tensor:
        """Convolve and run the rule; returns ``out_BTNV``."""
        ...


class LocalDeltaNetCore:
    """Convolution and rule over the whole local sequence.

    Args:
        rule: Backend of ``chunk_gated_delta_rule``.
        rule_of_few: Backend of ``fused_recurrent_gated_delta_rule``, for a few tokens without gradients.
        chunk_size: Chunks of the first, in tokens.
    """

    def __init__(
        self, rule: GatedDeltaRule = chunked, rule_of_few: GatedDeltaRule = recurrent, *, chunk_size: int = 64
    ) -> None:
        self.rule = rule
        self.rule_of_few = rule_of_few
        self.chunk_size = chunk_size

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Number the documents of each row; ``None`` where a row is one document.

        Returns:
            int64 ``segments_BT``, never falling, so that an id that comes back is another document.
        """
        if document_ids_BT is None:
            return None
        is_start_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
        is_start_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
        return is_start_BT.cumsum(dim=1)

    def __call__(self, inputs: DeltaNetInputs, mask: Tensor | None) -> Tensor:
        """See ``DeltaNetCore``."""
        is_short = inputs.v_BTNV.shape[1] <= _FEW_TOKENS and not torch.is_grad_enabled()
        rule = self.rule_of_few if is_short else self.rule
        return rule(
            convolve(inputs.q_BTKH, inputs.q_filter_KHW, mask),
            convolve(inputs.k_BTKH, inputs.k_filter_KHW, mask),
            convolve(inputs.v_BTNV, inputs.v_filter_NVW, mask),
            inputs.log_decay_BTN,
            inputs.beta_BTN,
            mask,
            chunk_size=self.chunk_size,
        )


def convolve(x_BTNH: Tensor, filter_NHW: Tensor, segments_BT: Tensor | None) -> Tensor:
    """Filter every channel over the last W tokens of its document, then SiLU.

    The last entry of a filter weighs the token itself, as in ``nn.Conv1d`` with padding before the sequence.

    Numerics: in fp32, one rounding at the end.
    """
    width, dtype = filter_NHW.shape[-1], torch.promote_types(x_BTNH.dtype, torch.float32)
    filter_NHW, wide_BTNH = filter_NHW.to(dtype), x_BTNH.to(dtype)
    out_BTNH = wide_BTNH * filter_NHW[..., -1]
    for distance in range(1, min(width, x_BTNH.shape[1])):
        weight_NH = filter_NHW[..., width - 1 - distance]
        earlier_BTNH = wide_BTNH[:, :-distance] * weight_NH
        if segments_BT is not None:
            same_BT = segments_BT[:, distance:] == segments_BT[:, :-distance]
            earlier_BTNH = earlier_BTNH * same_BT[:, :, None, None]
        out_BTNH = out_BTNH + F.pad(earlier_BTNH, (0, 0, 0, 0, distance, 0))
    return F.silu(out_BTNH).to(x_BTNH.dtype)


class GatedDeltaNet(nn.Module):
    """Project, convolve, run the gated delta rule, normalise, gate, project back.

    Attributes carry the names of Hugging Face's checkpoints. ``conv1d`` is a place for weights: the core applies them.

    Source: Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks", section 3.4; decay and its parameters: Dao and Gu
        2024, "Transformers are SSMs", section 7.

    Attributes:
        core: The ``DeltaNetCore`` in use; replace it to install another.
    """

    def __init__(self, config: DeltaNetConfig, core: DeltaNetCore) -> None:
        super().__init__()
        self.config = config
        self.core = core
        key_size = config.num_key_heads * config.key_head_dim
        value_size = config.num_value_heads * config.value_head_dim
        num_channels = 2 * key_size + value_size
        self.in_proj_qkv = nn.Linear(config.hidden_size, num_channels, bias=False)
        self.in_proj_z = nn.Linear(config.hidden_size, value_size, bias=False)
        self.in_proj_b = nn.Linear(config.hidden_size, config.num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(config.hidden_size, config.num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(num_channels, num_channels, config.conv_kernel_dim, groups=num_channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(config.num_value_heads))
        self.A_log = nn.Parameter(torch.zeros(config.num_value_heads))
        self.norm = GatedRMSNorm(config.value_head_dim, config.norm_eps)
        self.out_proj = nn.Linear(value_size, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, rope: RotaryTable, mask: Tensor | None) -> Tensor:
        """Return ``out_BTD``; order is known from the state, so ``rope`` is not read."""
        config = self.config
        key_size = config.num_key_heads * config.key_head_dim
        sizes = (key_size, key_size, config.num_value_heads * config.value_head_dim)
        q_BTX, k_BTX, v_BTX = self.in_proj_qkv(x_BTD).split(sizes, dim=-1)
        q_filter_XW, k_filter_XW, v_filter_XW = self.conv1d.weight.squeeze(1).split(sizes)
        keys, values = (-1, config.key_head_dim), (-1, config.value_head_dim)
        inputs = DeltaNetInputs(
            q_BTKH=q_BTX.unflatten(-1, keys),
            k_BTKH=k_BTX.unflatten(-1, keys),
            v_BTNV=v_BTX.unflatten(-1, values),
            log_decay_BTN=self._log_decay(self.in_proj_a(x_BTD)),
            beta_BTN=_widen(self.in_proj_b(x_BTD)).sigmoid(),
            q_filter_KHW=q_filter_XW.unflatten(0, keys),
            k_filter_KHW=k_filter_XW.unflatten(0, keys),
            v_filter_NVW=v_filter_XW.unflatten(0, values),
        )
        out_BTNV = self.core(inputs, mask)
        gate_BTNV = self.in_proj_z(x_BTD).unflatten(-1, values)
        return self.out_proj(self.norm(out_BTNV, gate_BTNV).flatten(-2))

    def _log_decay(self, a_BTN: Tensor) -> Tensor:
        return -_widen(self.A_log).exp() * F.softplus(_widen(a_BTN) + _widen(self.dt_bias))


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
