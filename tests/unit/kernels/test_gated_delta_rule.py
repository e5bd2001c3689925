"""The gated delta rule: the chunked form against the recurrent one, and that against the rule written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.kernels.flash_linear_attention import document_bounds
from torchtrain.kernels.gated_delta_rule import (
    CHUNK_GATED_DELTA_RULE,
    FUSED_RECURRENT_GATED_DELTA_RULE,
    DeltaRuleProblem,
    chunked,
    recurrent,
)
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_TENSOR, MODEL_GRADIENT, MODEL_OUTPUT

LENGTHS = ([1, 40, 16, 70, 3], [130], [64, 2, 64])


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def draw(rows=3, tokens=130, key_heads=2, value_heads=4, key_size=6, value_size=5, dtype=torch.float32):
    """Strong decays among weak ones: a product of many underflows, its reciprocal would overflow."""
    q, k = torch.randn(2, rows, tokens, key_heads, key_size, dtype=dtype)
    v = torch.randn(rows, tokens, value_heads, value_size, dtype=dtype)
    log_decay = -F.softplus(4 * torch.randn(rows, tokens, value_heads)).to(torch.promote_types(dtype, torch.float32))
    beta = torch.rand(rows, tokens, value_heads).to(log_decay.dtype)
    return [x.requires_grad_() for x in (q, k, v, log_decay, beta)]


def segments(lengths_of_rows=LENGTHS):
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths_of_rows])


def differentiate(rule, inputs, *rest, **options):
    out = rule(*inputs, *rest, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out, torch.autograd.grad(out, inputs, upstream)


def test_the_recurrent_form_is_the_rule_written_out():
    q, k, v, log_decay, beta = (x.detach().double() for x in draw(rows=1, tokens=9))
    out = recurrent(q, k, v, log_decay, beta, None)
    for head in range(4):
        state = torch.zeros(6, 5, dtype=torch.float64)
        for token in range(9):
            key = k[0, token, head // 2] / (k[0, token, head // 2].square().sum() + 1e-6).sqrt()
            query = q[0, token, head // 2] / (q[0, token, head // 2].square().sum() + 1e-6).sqrt()
            state = state * log_decay[0, token, head].exp()
            state = state + beta[0, token, head] * torch.outer(key, v[0, token, head] - key @ state)
            assert torch.allclose(out[0, token, head], query @ state / 6**0.5, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("is_packed", [False, True])
def test_chunked_equals_recurrent_in_results_and_gradients(chunk_size, is_packed):
    inputs, documents = draw(), segments() if is_packed else None
    expected, expected_grads = differentiate(recurrent, inputs, documents)
    out, grads = differentiate(chunked, inputs, documents, chunk_size=chunk_size)
    assert relative_error(out, expected) <= MODEL_OUTPUT
    for name, ours, theirs in zip(["q", "k", "v", "log_decay", "beta"], grads, expected_grads, strict=True):
        assert theirs.any()
        assert relative_error(ours, theirs) <= MODEL_GRADIENT, name


@pytest.mark.parametrize("rule", [chunked, recurrent])
def test_a_packed_document_is_what_it_is_alone(rule):
    inputs = draw()
    packed, packed_grads = differentiate(rule, inputs, segments(), chunk_size=32)
    upstream = torch.randn(packed.shape, generator=torch.Generator().manual_seed(1))
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            alone_inputs = [x[row : row + 1, part].detach().requires_grad_() for x in inputs]
            alone = rule(*alone_inputs, None, chunk_size=32)
            alone_grads = torch.autograd.grad(alone, alone_inputs, upstream[row : row + 1, part])
            assert relative_error(packed[row : row + 1, part], alone) <= MODEL_OUTPUT
            for ours, theirs in zip(packed_grads, alone_grads, strict=True):
                # The decay of a document's first token multiplies nothing.
                assert (ours[row : row + 1, part] - theirs).norm() <= MODEL_GRADIENT * ours.norm()
            start += length


def test_a_token_that_forgets_nearly_all_costs_the_others_no_digits():
    inputs = draw()
    forgets = torch.rand(inputs[3].shape) < 0.15
    inputs[3] = torch.where(forgets, -321.3, inputs[3].detach() / 100).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected, expected_grads = differentiate(recurrent, exact, segments())
    out, grads = differentiate(chunked, inputs, segments())
    assert relative_error(out, expected) <= MODEL_OUTPUT
    for name, ours, theirs in zip(["q", "k", "v", "log_decay", "beta"], grads, expected_grads, strict=True):
        assert relative_error(ours, theirs) <= MODEL_OUTPUT, name


class WrittenValues(TorchDispatchMode):
    """Counts the values of all results, views aside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.count += result.numel()
        return result


@pytest.mark.parametrize("rule", [chunked, recurrent])
def test_work_grows_with_the_tokens_and_not_with_their_square(rule):
    counts = []
    for tokens in (256, 512):
        with WrittenValues() as written:
            differentiate(rule, draw(rows=1, tokens=tokens), None, chunk_size=16)
        counts.append(written.count)
    assert counts[1] < 2.1 * counts[0]


def test_gradients_are_those_of_differences():
    inputs = [x.detach().double().requires_grad_() for x in draw(rows=1, tokens=19, key_heads=1, value_heads=2)]
    documents = segments([[7, 12]])
    assert torch.autograd.gradcheck(lambda *xs: chunked(*xs, documents, chunk_size=16), inputs)


def test_low_precision_is_accumulated_in_fp32_under_autocast_too():
    inputs = draw(dtype=torch.bfloat16)
    expected = recurrent(*(x.float() for x in inputs), None)
    with torch.autocast("cpu", torch.bfloat16):
        out = chunked(*inputs, None)
    assert out.dtype == torch.bfloat16
    # One rounding of the result, where bf16 products would add up 130.
    assert relative_error(out.float(), expected.to(torch.bfloat16).float()) <= BF16_TENSOR / 10


@pytest.mark.parametrize("op", [CHUNK_GATED_DELTA_RULE, FUSED_RECURRENT_GATED_DELTA_RULE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_is_chosen_and_the_plugin_never_imported_on_a_cpu(op, dtype):
    problem = DeltaRuleProblem("cpu", dtype, key_size=128, chunk_size=32)
    assert op.choose(problem).name == "torch"
    # Were the package asked for, this would fail where it is not installed.
    assert not op.backend("flash-linear-attention").is_able(problem)
    assert "cuda" in op.describe()


def test_bounds_of_documents_are_those_of_all_rows_in_one():
    assert document_bounds(segments([[2, 3], [5]])).tolist() == [0, 2, 5, 10]
