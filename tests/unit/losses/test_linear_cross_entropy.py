"""The loss straight from the head's input, against the head followed by cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.losses.cross_entropy import IGNORE_INDEX, LogitsLoss
from torchtrain.losses.linear_cross_entropy import (
    WHOLE_VOCABULARY,
    ChunkedLoss,
    VocabularyShard,
    linear_token_losses,
)
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_TENSOR, FP32_SCALAR, MODEL_GRADIENT

BATCH, TOKENS, HIDDEN, CLASSES = 2, 7, 6, 11
CHUNK_SIZES = pytest.mark.parametrize("chunk_size", [1, 4, 14, 100, None])


def make_problem(dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HIDDEN, generator=generator, dtype=torch.float64) * scale
    head = nn.Linear(HIDDEN, CLASSES, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(CLASSES, HIDDEN, generator=generator, dtype=torch.float64))
    labels = torch.randint(CLASSES, (BATCH, TOKENS), generator=generator)
    labels[0, 3:6] = IGNORE_INDEX
    upstream = torch.randn(BATCH, TOKENS, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), head, labels, upstream


def gradients(losses: Tensor, x: Tensor, head: nn.Linear, upstream: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(losses, (x, head.weight), upstream.to(losses.dtype))


@CHUNK_SIZES
def test_losses_and_gradients_equal_head_and_cross_entropy_in_fp64(chunk_size):
    x, head, labels, upstream = make_problem()
    losses = linear_token_losses(x, head.weight, labels, chunk_size=chunk_size)
    expected = F.cross_entropy(head(x).transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=1e-13)
    ours, theirs = (gradients(result, x, head, upstream) for result in (losses, expected))
    for gradient, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-12)


@CHUNK_SIZES
def test_gradient_is_the_derivative(chunk_size):
    x, head, labels, _ = make_problem(scale=1.0)
    assert torch.autograd.gradcheck(
        lambda x, weight: linear_token_losses(x, weight, labels, chunk_size=chunk_size), (x, head.weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_loss_equals_the_plain_one(dtype):
    x, head, labels, upstream = make_problem(dtype)
    results = [loss(x, head, labels) for loss in (ChunkedLoss(4), LogitsLoss())]
    assert [result.dtype for result in results] == [torch.float32] * 2
    assert relative_error(*results) <= FP32_SCALAR
    tolerance = MODEL_GRADIENT if dtype == torch.float32 else BF16_TENSOR
    for ours, theirs in zip(*(gradients(result, x, head, upstream) for result in results), strict=True):
        assert ours.dtype == theirs.dtype == dtype
        assert relative_error(ours, theirs) <= tolerance


def test_weight_gradient_of_many_low_precision_chunks_loses_nothing():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 512, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(CLASSES, HIDDEN, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(CLASSES, (1, 512), generator=generator)
    errors = []
    exact = weight.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(linear_token_losses(x.double(), exact, labels, chunk_size=None).sum(), exact)
    for chunk_size in (1, 512):
        (gradient,) = torch.autograd.grad(linear_token_losses(x, weight, labels, chunk_size=chunk_size).sum(), weight)
        errors.append(relative_error(gradient, truth))
    assert errors[0] <= 2 * errors[1]


@CHUNK_SIZES
def test_ignored_tokens_give_zero_and_no_gradient(chunk_size):
    x, head, labels, upstream = make_problem()
    losses = linear_token_losses(x, head.weight, labels, chunk_size=chunk_size)
    grad_x, _ = gradients(losses, x, head, upstream)
    assert (losses == 0).equal(labels == IGNORE_INDEX)
    assert (grad_x == 0).all(dim=-1).equal(labels == IGNORE_INDEX)


def test_a_batch_without_any_label_gives_zeros():
    x, head, labels, upstream = make_problem()
    losses = linear_token_losses(x, head.weight, torch.full_like(labels, IGNORE_INDEX), chunk_size=4)
    assert not losses.any()
    assert not any(gradient.any() for gradient in gradients(losses, x, head, upstream))


@CHUNK_SIZES
@pytest.mark.parametrize("shard", [WHOLE_VOCABULARY, VocabularyShard(start=5, vocab_size=5 + CLASSES)])
def test_label_outside_of_the_vocabulary_makes_its_own_loss_no_number(chunk_size, shard):
    x, head, labels, _ = make_problem()
    labels[0, 0], labels[1, 2] = shard.vocab_size or CLASSES, -1
    losses = linear_token_losses(x, head.weight, labels, chunk_size=chunk_size, shard=shard)
    assert losses.isnan().nonzero().tolist() == [[0, 0], [1, 2]]


@CHUNK_SIZES
def test_huge_logits_stay_finite(chunk_size):
    x, head, labels, upstream = make_problem(torch.float32, scale=1e4)
    losses = linear_token_losses(x, head.weight, labels, chunk_size=chunk_size)
    assert losses.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(losses, x, head, upstream))


@CHUNK_SIZES
def test_shards_of_the_vocabulary_add_up_to_the_whole(chunk_size):
    x, head, labels, upstream = make_problem()
    boundaries = [(0, 4), (4, 5), (5, CLASSES)]
    logits = [head(x).detach().flatten(0, 1)[:, start:stop] for start, stop in boundaries]
    highest = torch.stack([part.amax(-1) for part in logits])
    top = highest.amax(0)
    whole = linear_token_losses(x, head.weight, labels, chunk_size=chunk_size)
    grad_x, grad_weight = gradients(whole, x, head, upstream)
    total_x = torch.zeros_like(grad_x)
    for start, stop in boundaries:
        totals = torch.stack([(head(x).detach().flatten(0, 1) - top[:, None]).exp().sum(-1), torch.zeros(14)])
        totals[1] = head(x).detach().flatten(0, 1).gather(1, labels.flatten().clamp(min=0)[:, None])[:, 0]
        shard = VocabularyShard(start, CLASSES, lambda _: top, lambda _, totals=totals: totals)
        part = head.weight[start:stop].detach().requires_grad_()
        losses = linear_token_losses(x, part, labels, chunk_size=chunk_size, shard=shard)
        torch.testing.assert_close(losses, whole)
        part_x, part_weight = torch.autograd.grad(losses, (x, part), upstream)
        torch.testing.assert_close(part_weight, grad_weight[start:stop])
        total_x += part_x
    torch.testing.assert_close(total_x, grad_x)


def test_frozen_head_and_frozen_input_get_no_gradient():
    x, head, labels, upstream = make_problem()
    expected_x, expected_weight = gradients(
        linear_token_losses(x, head.weight, labels, chunk_size=4), x, head, upstream
    )
    frozen = linear_token_losses(x, head.weight.detach(), labels, chunk_size=4)
    assert torch.autograd.grad(frozen, x, upstream)[0].equal(expected_x)
    frozen = linear_token_losses(x.detach(), head.weight, labels, chunk_size=4)
    assert torch.autograd.grad(frozen, head.weight, upstream)[0].equal(expected_weight)


def test_autocast_computes_logits_in_its_dtype():
    x, head, labels, upstream = make_problem(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [loss(x, head, labels) for loss in (ChunkedLoss(4), LogitsLoss())]
    assert relative_error(*results) <= FP32_SCALAR
    for ours, theirs in zip(*(gradients(result, x, head, upstream) for result in results), strict=True):
        assert ours.dtype == torch.float32
        assert relative_error(ours, theirs) <= BF16_TENSOR


class LargestResult(TorchDispatchMode):
    """Sees every operator; remembers their results' memory, and the most elements that any of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
                self.storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits():
    tokens, hidden, classes, chunk = 64, 2, 100, 4
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    head = nn.Linear(hidden, classes, bias=False)
    labels = torch.randint(classes, (1, tokens))
    largest = {}
    for name, loss in {"chunked": ChunkedLoss(chunk), "plain": LogitsLoss()}.items():
        with LargestResult() as mode:
            loss(x, head, labels).sum().backward()
        largest[name] = mode.numel
    assert largest == {"chunked": chunk * classes, "plain": tokens * classes}


@pytest.mark.parametrize("chunk_size", [None, 64, 16])
def test_backward_makes_one_buffer_in_each_precision(chunk_size):
    tokens, hidden, classes = 64, 2, 100
    x = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=torch.bfloat16, requires_grad=True)
    losses = linear_token_losses(x, weight, torch.randint(classes, (1, tokens)), chunk_size=chunk_size)
    with LargestResult() as mode:
        losses.sum().backward()
    logits = (chunk_size or tokens) * classes
    made = sorted(storage.nbytes() for storage in mode.storages.values() if storage.nbytes() >= 2 * logits)
    assert made == [2 * logits, 4 * logits]
