"""The grouped product against one plain product per group, for every backend."""

from __future__ import annotations

import pytest
import torch

from torchtrain.kernels import grouped_mm as kernels
from torchtrain.kernels.grouped_mm import GROUPED_MM, GroupedProblem, grouped_mm
from torchtrain.kernels.registry import Backend, Op
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_TENSOR, MODEL_OUTPUT

BACKENDS = pytest.mark.parametrize("backend", ["torch_grouped_mm", "loop"])
COUNTS = ((3, 0, 5, 1), (0, 0, 0, 0), (0, 9, 0, 0), (0, 0, 2, 7))


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def offsets_of(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


class Poisoned:
    """A backend in which whatever the real one leaves unwritten holds NaN."""

    def __init__(self, name):
        self.products = GROUPED_MM.backend(name).implementation

    def rows(self, x_RK, weight_EKN, offsets_E):
        y_RN = self.products.rows(x_RK, weight_EKN, offsets_E)
        y_RN[int(offsets_E[-1]) :] = float("nan")
        return y_RN

    def outer(self, left_RM, right_RN, offsets_E):
        return self.products.outer(left_RM, right_RN, offsets_E)


for name in ("torch_grouped_mm", "loop"):
    GROUPED_MM.register(Backend(f"poisoned {name}", Poisoned(name), lambda problem: True))


def expected_rows(x_RK, weight_ENK, counts):
    groups = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.stack([x_RK[row] @ weight_ENK[group].T for row, group in enumerate(groups.tolist())])


@BACKENDS
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_meets_the_matrix_of_its_group(backend, counts, dtype):
    num_rows, tolerance = sum(counts), MODEL_OUTPUT if dtype == torch.float32 else BF16_TENSOR
    x_RK = torch.randn(num_rows, 16).to(dtype).requires_grad_()
    weight_ENK = torch.randn(4, 8, 16).to(dtype).requires_grad_()
    twin_x, twin_weight = (tensor.detach().double().requires_grad_() for tensor in (x_RK, weight_ENK))

    y_RN = grouped_mm(x_RK, weight_ENK, offsets_of(counts), is_exact=True, backend=backend)
    upstream_RN = torch.randn(num_rows, 8).to(dtype)
    y_RN.backward(upstream_RN)

    if num_rows == 0:
        assert y_RN.shape == (0, 8)
        assert weight_ENK.grad is not None
        assert not weight_ENK.grad.any()
        return
    expected_RN = expected_rows(twin_x, twin_weight, counts)
    expected_RN.backward(upstream_RN.double())
    assert relative_error(y_RN, expected_RN) <= tolerance
    for ours, twin in ((x_RK, twin_x), (weight_ENK, twin_weight)):
        assert ours.grad is not None
        assert ours.grad.dtype == dtype
        assert relative_error(ours.grad, twin.grad) <= tolerance


@BACKENDS
@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 0)])
def test_rows_past_the_last_offset_reach_nothing(backend, counts):
    """Poison in rows that belong to nobody: in the input, in the upstream gradient and in unwritten memory."""
    used = sum(counts)
    x_RK = torch.randn(used + 6, 16)
    x_RK[used:] = float("nan")
    x_RK.requires_grad_()
    weight_ENK = torch.randn(4, 8, 16).requires_grad_()
    upstream_RN = torch.randn(used + 6, 8)
    upstream_RN[used:] = float("nan")

    y_RN = grouped_mm(x_RK, weight_ENK, offsets_of(counts), backend=f"poisoned {backend}")
    y_RN.backward(upstream_RN)

    clean_x, clean_weight = x_RK.detach()[:used].clone().requires_grad_(), weight_ENK.detach().clone().requires_grad_()
    clean_y = grouped_mm(clean_x, clean_weight, offsets_of(counts), backend=backend)
    clean_y.backward(upstream_RN[:used])
    assert torch.equal(y_RN[:used], clean_y)
    assert not y_RN[used:].any()
    assert x_RK.grad is not None
    assert torch.equal(x_RK.grad[:used], clean_x.grad)
    assert not x_RK.grad[used:].any()
    assert torch.equal(weight_ENK.grad, clean_weight.grad)


def test_sizes_that_torch_cannot_take_go_to_the_loop():
    def chosen(dtype, sizes, device="cpu"):
        return GROUPED_MM.choose(GroupedProblem(device, dtype, 4, sizes)).name

    assert chosen(torch.float32, (37, 30)) == "loop"
    assert chosen(torch.bfloat16, (36, 64)) == "loop"
    assert chosen(torch.float64, (64, 64)) == "loop"
    assert chosen(torch.float32, (64, 64), device="cuda") == "loop"
    assert chosen(torch.bfloat16, (64, 64), device="cuda") == "torch_grouped_mm"
    with pytest.raises(RuntimeError, match="16 bytes"):
        kernels.TorchGroupedMM().rows(torch.randn(4, 30), torch.randn(2, 30, 37), offsets_of((2, 2)))


def test_the_operator_is_sound():
    x_RK, weight_ENK = torch.randn(9, 16, requires_grad=True), torch.randn(4, 8, 16, requires_grad=True)
    arguments = (x_RK, weight_ENK, offsets_of((3, 0, 5, 1)), True, False, "loop")
    torch.library.opcheck(torch.ops.torchtrain.grouped_mm.default, arguments)


def test_a_registry_takes_the_first_able_backend_and_no_name_twice():
    op: Op[int, str] = Op("echo", lambda problem: ("fast", "slow"))
    op.register(Backend("slow", "s", lambda problem: True))
    op.register(Backend("fast", "f", lambda problem: problem < 3))
    assert [op.choose(problem).implementation for problem in (1, 5)] == ["f", "s"]
    with pytest.raises(ValueError, match="already"):
        op.register(Backend("slow", "s", lambda problem: True))
    picky: Op[int, str] = Op("picky", lambda problem: ("absent",))
    with pytest.raises(ValueError, match="no backend of picky"):
        picky.choose(1)
