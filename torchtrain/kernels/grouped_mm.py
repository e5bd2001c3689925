"""Op ``grouped_mm``: each expert's rows times that expert's matrix, in one call.

Rows are sorted by group; ``offsets_E`` says where each group ends. Rows past the last offset belong to nobody: whatever
they hold, NaN included, reaches no result and no gradient, and their own results and gradients are zero.

Shape legend: R = rows, E = groups (experts), K = contracted size, N = output size; M and N = sizes of an outer product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.kernels.registry import Backend, Op


@dataclass(frozen=True)
class GroupedProblem:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    num_groups: int
    sizes: tuple[int, int]
    """The two sizes of a group's matrix."""


class GroupedProducts(Protocol):
    """What a backend computes. Rows past the last offset may come back as anything; ``grouped_mm`` clears them."""

    def rows(self, x_RK: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Multiply each row by the matrix of its group; returns ``y_RN``."""
        ...

    def outer(self, left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
        """Sum each group's outer products; returns ``product_EMN``, zero where a group has no rows."""
        ...


class TorchGroupedMM:
    """torch's ``grouped_mm``."""

    def rows(self, x_RK: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return F.grouped_mm(x_RK, weight_EKN, offs=offsets_E)

    def outer(self, left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        return F.grouped_mm(left_RM.T, right_RN, offs=offsets_E)


class Loop:
    """One matrix product per group. Reads the offsets on the host: on an accelerator that is a sync per call."""

    def rows(self, x_RK: Tensor, weight_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        y_RN = x_RK.new_empty(x_RK.shape[0], weight_EKN.shape[2])
        start = 0
        for group, end in enumerate(offsets_E.tolist()):
            torch.mm(x_RK[start:end], weight_EKN[group], out=y_RN[start:end])
            start = end
        return y_RN

    def outer(self, left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor) -> Tensor:
        """See ``GroupedProducts``."""
        product_EMN = left_RM.new_empty(len(offsets_E), left_RM.shape[1], right_RN.shape[1])
        start = 0
        for group, end in enumerate(offsets_E.tolist()):
            torch.mm(left_RM[start:end].T, right_RN[start:end], out=product_EMN[group])
            start = end
        return product_EMN


_TORCH_DTYPES = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
_ALIGNED_BYTES = 16


def _torch_is_able(problem: GroupedProblem) -> bool:
    # It wants the rows of all its operands to begin at multiples of 16 bytes; of gradients both sizes are rows.
    is_aligned = all(size * problem.dtype.itemsize % _ALIGNED_BYTES == 0 for size in problem.sizes)
    return is_aligned and problem.dtype in _TORCH_DTYPES.get(problem.device, ())


# Measured by scripts/measure_grouped_mm.py, forward with backward, see docs/log.md: on CPUs torch's takes 0.80 to
# 1.03 of the loop's time, whatever the sizes and the skew. Elsewhere the loop would sync once a call; not measured.
_PREFERENCE: dict[tuple[str, torch.dtype], Sequence[str]] = {
    ("cpu", torch.float32): ("torch_grouped_mm", "loop"),
    ("cpu", torch.bfloat16): ("torch_grouped_mm", "loop"),
}
_UNMEASURED = ("torch_grouped_mm", "loop")


def _prefer(problem: GroupedProblem) -> Sequence[str]:
    return _PREFERENCE.get((problem.device, problem.dtype), _UNMEASURED)


GROUPED_MM: Op[GroupedProblem, GroupedProducts] = Op("grouped_mm", _prefer)
GROUPED_MM.register(
    Backend(
        "torch_grouped_mm",
        TorchGroupedMM(),
        _torch_is_able,
        conditions="cpu in fp32, bf16 or fp16, cuda in bf16; rows that begin at multiples of 16 bytes",
    )
)
GROUPED_MM.register(Backend("loop", Loop(), lambda problem: True))


def grouped_mm(
    x_RK: Tensor, weight_ENK: Tensor, offsets_E: Tensor, *, is_exact: bool = False, backend: str | None = None
) -> Tensor:
    """Multiply each row by the transposed matrix of its group, as ``nn.Linear`` does.

    Args:
        x_RK: Rows sorted by group.
        weight_ENK: One matrix a group, in the dtype of ``x_RK``.
        offsets_E: int32, the end of each group; not falling, the last at most R.
        is_exact: The last offset is R. Saves a pass over the result on devices where looking would cost a sync.
        backend: Name of the backend; ``None`` takes the preferred one of those that are able.

    Returns:
        ``y_RN``; zero in rows past the last offset.

    Numerics: sums in the backend's accumulator (fp32 for low precision), one rounding at the end.
    """
    if backend is None:
        sizes = (weight_ENK.shape[1], weight_ENK.shape[2])
        backend = GROUPED_MM.choose(GroupedProblem(x_RK.device.type, x_RK.dtype, weight_ENK.shape[0], sizes)).name
    return _grouped_mm(x_RK, weight_ENK, offsets_E, True, is_exact, backend)


# Operators of their own rather than one autograd.Function: activation checkpointing can keep their results by name, and
# compile takes them as they are, which it does not do with torch's in fp32.
@torch.library.custom_op("torchtrain::grouped_mm", mutates_args=())
def _grouped_mm(
    x_RK: Tensor, weight: Tensor, offsets_E: Tensor, is_transposed: bool, is_exact: bool, backend: str
) -> Tensor:
    num_columns = weight.shape[1 if is_transposed else 2]
    if x_RK.shape[0] == 0:
        return x_RK.new_empty(0, num_columns)
    weight_EKN = weight.transpose(1, 2) if is_transposed else weight
    y_RN = GROUPED_MM.backend(backend).implementation.rows(x_RK.contiguous(), weight_EKN, offsets_E)
    if not is_exact:
        _clear_tail_(y_RN, offsets_E)
    return y_RN


@_grouped_mm.register_fake
def _(x_RK: Tensor, weight: Tensor, offsets_E: Tensor, is_transposed: bool, is_exact: bool, backend: str) -> Tensor:
    return x_RK.new_empty(x_RK.shape[0], weight.shape[1 if is_transposed else 2])


@torch.library.custom_op("torchtrain::grouped_outer", mutates_args=())
def _grouped_outer(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor, backend: str) -> Tensor:
    if left_RM.shape[0] == 0:
        return left_RM.new_zeros(offsets_E.shape[0], left_RM.shape[1], right_RN.shape[1])
    products = GROUPED_MM.backend(backend).implementation
    return products.outer(left_RM.contiguous(), right_RN.contiguous(), offsets_E)


@_grouped_outer.register_fake
def _(left_RM: Tensor, right_RN: Tensor, offsets_E: Tensor, backend: str) -> Tensor:
    return left_RM.new_empty(offsets_E.shape[0], left_RM.shape[1], right_RN.shape[1])


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x_RK, weight, offsets_E, ctx.is_transposed, ctx.is_exact, ctx.backend = inputs
    ctx.save_for_backward(x_RK, weight, offsets_E)


def _grouped_mm_backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
    x_RK, weight, offsets_E = ctx.saved_tensors
    grad_x_RK, grad_weight = None, None
    if ctx.needs_input_grad[0]:
        grad_x_RK = _grouped_mm(grad_RN, weight, offsets_E, not ctx.is_transposed, ctx.is_exact, ctx.backend)
    if ctx.needs_input_grad[1]:
        left, right = (grad_RN, x_RK) if ctx.is_transposed else (x_RK, grad_RN)
        grad_weight = _grouped_outer(left, right, offsets_E, ctx.backend)
    return grad_x_RK, grad_weight, None, None, None, None


_grouped_mm.register_autograd(_grouped_mm_backward, setup_context=_save_operands)

GROUPED_MM_OPERATOR = torch.ops.torchtrain.grouped_mm.default
"""As dispatch modes see it."""


def _clear_tail_(y_RN: Tensor, offsets_E: Tensor) -> None:
    if y_RN.device.type == "cpu":
        num_rows = int(offsets_E[-1])
        if num_rows < y_RN.shape[0]:
            y_RN[num_rows:].zero_()
        return
    # Filled, not multiplied: nothing times NaN is zero.
    is_tail_R = torch.arange(y_RN.shape[0], device=y_RN.device) >= offsets_E[-1]
    y_RN.masked_fill_(is_tail_R[:, None], 0.0)
