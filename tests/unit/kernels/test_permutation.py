"""Ops ``permute`` and ``unpermute``: every backend is ``nn.permutation``, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtrain.kernels.permutation import PERMUTE, UNPERMUTE, PermutationProblem, permute, unpermute
from torchtrain.nn.permutation import combine, sort_by_expert, spread
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import DISPATCHED


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel()).view_as(y))]


@pytest.mark.parametrize("backend", PERMUTE.names())
@pytest.mark.parametrize(("num_tokens", "num_choices"), [(9, 2), (5, 1), (6, 4), (0, 2)])
def test_both_ops_are_what_nn_says(backend: str, num_tokens: int, num_choices: int) -> None:
    generator = torch.Generator().manual_seed(3)
    ids = torch.rand(num_tokens, 4, generator=generator).topk(num_choices).indices
    order = sort_by_expert(ids, 4)
    x = torch.randn(num_tokens, 6, generator=generator, requires_grad=True)
    rows = torch.randn(num_tokens * num_choices, 6, generator=generator, requires_grad=True)
    weights = torch.rand(num_tokens, num_choices, generator=generator, requires_grad=True)
    spread_out = permute(x, order.slots_R, order.rows_R, num_choices, backend=backend)
    added_up = unpermute(rows, weights, order.slots_R, order.rows_R, backend=backend)
    pairs = [
        *zip(gradients(spread_out, x), gradients(spread(x, order), x), strict=True),
        *zip(gradients(added_up, rows, weights), gradients(combine(rows, weights, order), rows, weights), strict=True),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        assert relative_error(ours, theirs) <= DISPATCHED


def test_low_precision_is_left_to_the_backend_that_sums_in_fp32() -> None:
    for op in (PERMUTE, UNPERMUTE):
        assert op.choose(PermutationProblem("cpu", torch.float32, 2)).name == "one_pass"
        assert op.choose(PermutationProblem("cpu", torch.bfloat16, 2)).name == "eager"
        assert op.choose(PermutationProblem("cuda", torch.float32, 2)).name == "eager"


def test_bf16_rows_are_rounded_once() -> None:
    order = sort_by_expert(torch.tensor([[0, 1, 2, 3]]), 4)
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert (
        unpermute(rows, torch.ones(1, 4), order.slots_R, order.rows_R).item() == torch.tensor(259.0).bfloat16().item()
    )
