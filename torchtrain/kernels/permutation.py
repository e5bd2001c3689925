"""Ops ``permute`` and ``unpermute``: tokens to rows sorted by expert, and rows added up by weight into tokens again.

``nn.permutation`` says what they mean, one plain operation after the other; here the passes over memory are fewer. No
two threads add to one row in any backend, so results are deterministic.

Shape legend: N = tokens, K = experts a token visits, R = N * K rows, D = hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.kernels.registry import Backend, Op


@dataclass(frozen=True)
class PermutationProblem:
    """What the choice of a backend depends on."""

    device: str
    dtype: torch.dtype
    num_choices: int


class Permute(Protocol):
    """What a backend of ``permute`` computes."""

    def forward(self, x_ND: Tensor, tokens_R: Tensor) -> Tensor:
        """Copy each token to its rows; returns ``x_RD``."""
        ...

    def backward(self, grad_RD: Tensor, rows_NK: Tensor) -> Tensor:
        """Add up each token's rows; returns ``grad_ND``."""
        ...


class Unpermute(Protocol):
    """What a backend of ``unpermute`` computes."""

    def forward(self, y_RD: Tensor, weights_NK: Tensor, rows_NK: Tensor) -> Tensor:
        """Add up each token's rows by weight; returns ``y_ND``."""
        ...

    def backward(
        self, grad_ND: Tensor, y_RD: Tensor, weights_NK: Tensor, slots_R: Tensor, rows_NK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return ``grad_RD`` of the rows and ``grad_NK`` of the weights."""
        ...


class EagerPermute:
    """One operation after the other, on any device and dtype."""

    def forward(self, x_ND: Tensor, tokens_R: Tensor) -> Tensor:
        """See ``Permute``."""
        return x_ND[tokens_R]

    def backward(self, grad_RD: Tensor, rows_NK: Tensor) -> Tensor:
        """See ``Permute``."""
        return grad_RD[rows_NK].sum(dim=1)


class EagerUnpermute:
    """One operation after the other, on any device and dtype."""

    def forward(self, y_RD: Tensor, weights_NK: Tensor, rows_NK: Tensor) -> Tensor:
        """See ``Unpermute``."""
        return (y_RD[rows_NK] * weights_NK[..., None]).sum(dim=1).to(y_RD.dtype)

    def backward(
        self, grad_ND: Tensor, y_RD: Tensor, weights_NK: Tensor, slots_R: Tensor, rows_NK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Unpermute``."""
        grad_N1D = grad_ND.to(weights_NK.dtype)[:, None]
        grad_NKD = grad_N1D * weights_NK[..., None]
        return grad_NKD.flatten(0, 1)[slots_R].to(y_RD.dtype), (grad_N1D * y_RD[rows_NK]).sum(dim=-1)


class OnePassPermute:
    """Sums of rows as bags of an embedding: read once, added in registers, written once."""

    def forward(self, x_ND: Tensor, tokens_R: Tensor) -> Tensor:
        """See ``Permute``."""
        return x_ND.index_select(0, tokens_R)

    def backward(self, grad_RD: Tensor, rows_NK: Tensor) -> Tensor:
        """See ``Permute``."""
        return F.embedding_bag(rows_NK, grad_RD, mode="sum")


class OnePassUnpermute:
    """Likewise, with weights; nothing of N x K x D ever exists."""

    def forward(self, y_RD: Tensor, weights_NK: Tensor, rows_NK: Tensor) -> Tensor:
        """See ``Unpermute``."""
        return F.embedding_bag(rows_NK, y_RD, per_sample_weights=weights_NK, mode="sum")

    def backward(
        self, grad_ND: Tensor, y_RD: Tensor, weights_NK: Tensor, slots_R: Tensor, rows_NK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``Unpermute``."""
        grad_RD = grad_ND.index_select(0, slots_R // rows_NK.shape[1])
        grad_R = torch.linalg.vecdot(grad_RD, y_RD)
        grad_RD.mul_(weights_NK.flatten()[slots_R][:, None])
        return grad_RD, grad_R[rows_NK]


def _one_pass_is_able(problem: PermutationProblem) -> bool:
    # In lower precision a bag would add up in that precision, and other devices were not measured.
    return (problem.device, problem.dtype) == ("cpu", torch.float32)


def _prefer(problem: PermutationProblem) -> tuple[str, ...]:
    # Measured by scripts/measure_permutation.py, forward with backward, see docs/log.md.
    return ("one_pass", "eager")


PERMUTE: Op[PermutationProblem, Permute] = Op("permute", _prefer)
PERMUTE.register(Backend("one_pass", OnePassPermute(), _one_pass_is_able))
PERMUTE.register(Backend("eager", EagerPermute(), lambda problem: True))

UNPERMUTE: Op[PermutationProblem, Unpermute] = Op("unpermute", _prefer)
UNPERMUTE.register(Backend("one_pass", OnePassUnpermute(), _one_pass_is_able))
UNPERMUTE.register(Backend("eager", EagerUnpermute(), lambda problem: True))


def permute(x_ND: Tensor, slots_R: Tensor, rows_R: Tensor, num_choices: int, *, backend: str | None = None) -> Tensor:
    """Copy each token to the row of each of its visits.

    Args:
        x_ND: Tokens, perhaps none.
        slots_R: int64, each row's visit, counted token by token.
        rows_R: int64, each visit's row; the inverse.
        num_choices: K.
        backend: Name of the backend; ``None`` takes the preferred one of those that are able.

    Returns:
        ``x_RD``.
    """
    if backend is None:
        backend = PERMUTE.choose(PermutationProblem(x_ND.device.type, x_ND.dtype, num_choices)).name
    tokens_R, rows_NK = slots_R // num_choices, rows_R.unflatten(0, (x_ND.shape[0], num_choices))
    return cast(Tensor, _Permute.apply(x_ND.contiguous(), tokens_R, rows_NK, PERMUTE.backend(backend).implementation))


def unpermute(
    y_RD: Tensor, weights_NK: Tensor, slots_R: Tensor, rows_R: Tensor, *, backend: str | None = None
) -> Tensor:
    """Add up each token's rows by weight.

    Args:
        y_RD: Rows in the order that ``permute`` gave them.
        weights_NK: fp32, of each visit.
        slots_R: As for ``permute``.
        rows_R: As for ``permute``.
        backend: As for ``permute``.

    Returns:
        ``y_ND``.

    Numerics: products and sum in fp32, rounded once to the dtype of the rows.
    """
    if backend is None:
        backend = UNPERMUTE.choose(PermutationProblem(y_RD.device.type, y_RD.dtype, weights_NK.shape[1])).name
    implementation = UNPERMUTE.backend(backend).implementation
    rows_NK = rows_R.unflatten(0, weights_NK.shape)
    return cast(Tensor, _Unpermute.apply(y_RD.contiguous(), weights_NK, slots_R, rows_NK, implementation))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, tokens_R: Tensor, rows_NK: Tensor, implementation: Permute) -> Tensor:
        ctx.save_for_backward(rows_NK)
        ctx.implementation = implementation
        return implementation.forward(x_ND, tokens_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        (rows_NK,) = ctx.saved_tensors
        (grad_RD,) = grads
        if grad_RD.shape[0] == 0:
            return grad_RD, None, None, None
        return ctx.implementation.backward(grad_RD.contiguous(), rows_NK), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_RD: Tensor, weights_NK: Tensor, slots_R: Tensor, rows_NK: Tensor, implementation: Unpermute
    ) -> Tensor:
        ctx.save_for_backward(y_RD, weights_NK, slots_R, rows_NK)
        ctx.implementation = implementation
        if y_RD.shape[0] == 0:
            return y_RD.clone()
        return implementation.forward(y_RD, weights_NK, rows_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        y_RD, weights_NK, slots_R, rows_NK = ctx.saved_tensors
        if y_RD.shape[0] == 0:
            return torch.empty_like(y_RD), torch.empty_like(weights_NK), None, None, None
        grad_RD, grad_NK = ctx.implementation.backward(grads[0].contiguous(), y_RD, weights_NK, slots_R, rows_NK)
        return grad_RD, grad_NK, None, None, None
