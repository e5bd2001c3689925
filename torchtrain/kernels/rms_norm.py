"""Op ``rms_norm``: vectors of unit root mean square, times a weight.

Shape legend: D = hidden size; ``x`` may have any leading dims.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.kernels.registry import Backend, Op


@dataclass(frozen=True)
class NormProblem:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype


class RMSNormKernel(Protocol):
    """What a backend computes."""

    def __call__(self, x: Tensor, weight_D: Tensor, eps: float, *, offset: float) -> Tensor:
        """Normalise the last dim and multiply by ``offset + weight_D``; the result has the dtype of ``x``.

        Numerics: in fp32 (fp64 for fp64), one rounding at the end.
        """
        ...


def torch_rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Use torch's kernel; see ``RMSNormKernel``."""
    if weight_D.dtype == x.dtype and offset == 0.0:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    # Under autocast fp32 weights meet low-precision activations, a pair torch's fused kernel does not take.
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale_D = weight_D.to(dtype) + offset if offset else weight_D.to(dtype)
    return F.rms_norm(x.to(dtype), weight_D.shape, scale_D, eps).to(x.dtype)


@cache
def _liger() -> Any:
    return importlib.import_module("liger_kernel.transformers.functional")


@torch.compiler.disable
def liger_rms_norm(x: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
    """Use liger's Triton kernel, bound at the first call; see ``RMSNormKernel``."""
    # Its mode "gemma" multiplies by the weight before it rounds.
    return _liger().liger_rms_norm(x, weight_D, eps, offset=offset, casting_mode="gemma", in_place=False)


RMS_NORM: Op[NormProblem, RMSNormKernel] = Op("rms_norm", lambda problem: ("torch",))
RMS_NORM.register(Backend("torch", torch_rms_norm, lambda problem: True))
RMS_NORM.register(
    Backend(
        "liger-kernel",
        liger_rms_norm,
        lambda problem: problem.device == "cuda",
        plugin="liger-kernel",
        conditions="cuda, any dtype",
    )
)
