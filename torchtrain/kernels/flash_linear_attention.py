"""The gated delta rule by the package flash-linear-attention: Triton kernels, for CUDA.

Nothing of the package is imported before a backend is asked about a CUDA problem: importing it looks for a driver.

Shape legend: as in ``gated_delta_rule``; R = B * T.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

MODULE = "fla"
_DEFAULT_CHUNK = 64


@cache
def _bind(symbol: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"{MODULE}.ops.gated_delta_rule"), symbol)


@cache
def _names_chunk_size(symbol: str) -> bool:
    return "chunk_size" in inspect.signature(_bind(symbol)).parameters


def takes_chunks_of(symbol: str, chunk_size: int) -> bool:
    """Whether the installed version computes chunks of this size. Imports the package."""
    return chunk_size == _DEFAULT_CHUNK or symbol.startswith("fused_recurrent") or _names_chunk_size(symbol)


class LazyRule:
    """A function of the package as a ``GatedDeltaRule``, bound at the first call.

    Args:
        symbol: Its name there.
    """

    def __init__(self, symbol: str) -> None:
        self._symbol = symbol

    @torch.compiler.disable
    def __call__(
        self,
        q_BTKH: Tensor,
        k_BTKH: Tensor,
        v_BTNV: Tensor,
        log_decay_BTN: Tensor,
        beta_BTN: Tensor,
        segments_BT: Tensor | None,
        *,
        chunk_size: int,
    ) -> Tensor:
        """See ``GatedDeltaRule``. Documents travel as one row and its bounds, which the host must know: a sync."""
        group = v_BTNV.shape[2] // k_BTKH.shape[2]
        q, k = (x.repeat_interleave(group, dim=2) if group > 1 else x for x in (q_BTKH, k_BTKH))
        inputs = [x.to(v_BTNV.dtype) for x in (q, k, v_BTNV)] + [log_decay_BTN, beta_BTN]
        options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
        if _names_chunk_size(self._symbol):
            options["chunk_size"] = chunk_size
        if segments_BT is not None:
            inputs = [x.flatten(0, 1)[None] for x in inputs]
            options["cu_seqlens"] = document_bounds(segments_BT)
        q, k, v, log_decay, beta = inputs
        out, _ = _bind(self._symbol)(q, k, v, g=log_decay, beta=beta, **options)
        return out.reshape(v_BTNV.shape)


def document_bounds(segments_BT: Tensor) -> Tensor:
    """Where documents begin when all rows lie behind one another, and where the last ends; int64."""
    is_start_BT = torch.ones_like(segments_BT, dtype=torch.bool)
    is_start_BT[:, 1:] = segments_BT[:, 1:] != segments_BT[:, :-1]
    starts = is_start_BT.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([segments_BT.numel()])))
