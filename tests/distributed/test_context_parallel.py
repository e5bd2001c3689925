"""Each context-parallel core against attention on one device: output and the gradients of queries, keys and values."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from torchtrain.config.parallel import CpMode
from torchtrain.distributed.context_parallel import apply, block_attention
from torchtrain.distributed.context_parallel.apply import apply_context_parallel
from torchtrain.distributed.context_parallel.sequence_layout import SequenceLayout, resolve_sequence_layout
from torchtrain.distributed.context_parallel.tail_attention import TailAttention
from torchtrain.nn.attention import Attention, AttentionConfig, SDPACore
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import BF16_TENSOR, EXACT, FP32_TENSOR

MODES: tuple[CpMode, ...] = ("ulysses", "allgather", "ring")


@dataclass(frozen=True)
class Shape:
    """One attention problem."""

    num_heads: int
    num_key_value_heads: int
    head_dim: int = 8
    num_tokens: int = 24
    batch: int = 2
    is_packed: bool = True
    dtype: torch.dtype = torch.float32


def make_problem(shape: Shape) -> tuple[list[Tensor], Tensor | None]:
    """Queries, keys, values and the output's gradient, then document ids; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    heads = (shape.num_heads, shape.num_key_value_heads, shape.num_key_value_heads, shape.num_heads)
    tensors = [
        torch.randn(shape.batch, shape.num_tokens, n, shape.head_dim, generator=generator).to(shape.dtype)
        for n in heads
    ]
    starts = torch.rand(shape.batch, shape.num_tokens, generator=generator) < 0.2
    return tensors, starts.cumsum(dim=1) if shape.is_packed else None


def attend(core, tensors: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    """Output and gradients."""
    *qkv, grad = tensors
    q, k, v = (x.detach().clone().requires_grad_() for x in qkv)
    out = core(q, k, v, core.build_mask(documents))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def install(mode: CpMode):
    """The core that the mode installs, and this rank's layout."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with torch.device("meta"):
        attention = Attention(AttentionConfig(8, 2, 1, 4), SDPACore())
    apply_context_parallel(attention, mode, init_device_mesh("cpu", (size,)))
    return attention.core, resolve_sequence_layout(mode, size, rank)


def errors_on_this_rank(cases: list[tuple[CpMode, Shape]]) -> list[list[float]]:
    """How far this rank's share of output and gradients is from one device's."""
    found = []
    for mode, shape in cases:
        core, layout = install(mode)
        tensors, documents = make_problem(shape)
        expected = attend(SDPACore(), tensors, documents)
        actual = attend(core, [layout.take(x) for x in tensors], documents)
        pairs = zip(actual, expected, strict=True)
        found.append([relative_error(ours, layout.take(theirs)) for ours, theirs in pairs])
    return found


SHAPES = [
    Shape(4, 4),
    Shape(4, 4, is_packed=False),
    Shape(8, 2, head_dim=7),
    Shape(8, 2, head_dim=7, is_packed=False),
    Shape(4, 1, num_tokens=16, batch=1),
    Shape(12, 3, is_packed=False),
]
EVEN_KEYS = [shape for shape in SHAPES if shape.num_key_value_heads != 3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_core_equals_attention_on_one_device(mode: CpMode, world_size: int) -> None:
    shapes = EVEN_KEYS if world_size == 2 and mode == "ulysses" else SHAPES
    for errors in run_ranks(errors_on_this_rank, world_size, [(mode, shape) for shape in shapes]):
        for shape, of_shape in zip(shapes, errors, strict=True):
            assert max(of_shape) <= FP32_TENSOR, f"{shape}: output and gradients of q, k, v are off by {of_shape}"


def test_bf16_stays_near_attention_on_one_device_in_bf16() -> None:
    cases = [(mode, Shape(4, 2, dtype=torch.bfloat16, num_tokens=16)) for mode in MODES]
    for errors in run_ranks(errors_on_this_rank, 2, cases):
        assert max(max(of_mode) for of_mode in errors) <= BF16_TENSOR


def errors_with_plain_blocks(cases: list[tuple[CpMode, Shape]]) -> list[list[float]]:
    """The ring as on a device without a fused kernel of ours, a few rows at a time."""
    from torchtrain.distributed.context_parallel import ring

    block_attention._MAX_SCORES = 100
    ring.attend_block = block_attention.attend_block_plainly
    ring.differentiate_block = block_attention.differentiate_block_plainly
    return errors_on_this_rank(cases)


def errors_by_torchs_attention(cases: list[tuple[CpMode, Shape]]) -> list[list[float]]:
    """The modes as on an accelerator, with torch's attention and its masks."""
    original = TailAttention.__init__
    TailAttention.__init__ = lambda self, *, is_blockwise: original(self, is_blockwise=False)
    return errors_on_this_rank(cases)


def test_core_over_torchs_attention_equals_attention_on_one_device() -> None:
    cases = [(mode, shape) for mode in ("ulysses", "allgather") for shape in EVEN_KEYS]
    for errors in run_ranks(errors_by_torchs_attention, 2, cases):
        assert max(max(of_shape) for of_shape in errors) <= FP32_TENSOR


def test_ring_without_a_fused_kernel_equals_attention_on_one_device() -> None:
    cases = [("ring", shape) for shape in SHAPES]
    for errors in run_ranks(errors_with_plain_blocks, 2, cases):
        assert max(max(of_shape) for of_shape in errors) <= FP32_TENSOR


@pytest.mark.parametrize("kind", ["all", "causal", "mask"])
def test_fused_kernel_equals_plain_products_also_in_rows_that_see_nothing(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    size = 9 if kind == "causal" else 11
    q, grad = (torch.randn(2, 6, 9, 5, generator=generator) for _ in range(2))
    k, v = (torch.randn(2, 2, size, 5, generator=generator) for _ in range(2))
    mask = torch.rand(2, 1, 9, size, generator=generator) < 0.3 if kind == "mask" else None
    if mask is not None:
        mask[:, :, 4] = False
    visible = block_attention.Visible(mask, is_causal=kind == "causal")
    fused = block_attention.attend_block(q, k, v, visible)
    plain = block_attention.attend_block_plainly(q, k, v, visible)
    assert relative_error(fused.out_BNTH, plain.out_BNTH) <= FP32_TENSOR
    assert torch.equal(fused.lse_BNT.isinf(), plain.lse_BNT.isinf())
    assert relative_error(fused.lse_BNT.exp(), plain.lse_BNT.exp()) <= FP32_TENSOR
    # Merged with other keys, so that the log-denominator is not the block's own.
    other = block_attention.Partial(torch.randn(2, 6, 9, 5, generator=generator), torch.zeros(2, 6, 9))
    merging = block_attention.MergedAttention(other)
    merging.add(plain)
    merged = merging.partial
    ours = block_attention.differentiate_block(grad, q, k, v, merged, visible)
    theirs = block_attention.differentiate_block_plainly(grad, q, k, v, merged, visible)
    for actual, expected in zip(ours, theirs, strict=True):
        assert relative_error(actual, expected) <= FP32_TENSOR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_added_in_one_place_and_left_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 8, 4, generator=generator).to(dtype) for _ in range(3))
    all_keys = block_attention.Visible(None, is_causal=False)
    later = slice(4, None)
    first, second, third = (
        block_attention.attend_block_plainly(q[:, :, rows], k[:, :, keys], v[:, :, keys], all_keys)
        for rows, keys in ((slice(None), slice(2)), (slice(None), slice(2, 5)), (later, slice(5, 8)))
    )
    originals = [tensor.clone() for part in (first, second, third) for tensor in (part.out_BNTH, part.lse_BNT)]
    merging = block_attention.MergedAttention(first)
    merging.add(second)
    place = merging.partial.out_BNTH.data_ptr()
    merging.add(third, later)
    merged = merging.partial
    assert merged.out_BNTH.data_ptr() == place
    assert merged.out_BNTH.dtype == torch.float32
    parts = [tensor for part in (first, second, third) for tensor in (part.out_BNTH, part.lse_BNT)]
    assert all(part.equal(original) for part, original in zip(parts, originals, strict=True))
    tolerance = FP32_TENSOR if dtype == torch.float32 else BF16_TENSOR
    for rows, keys in ((slice(4), slice(5)), (later, slice(8))):
        whole = block_attention.attend_block_plainly(q[:, :, rows], k[:, :, keys], v[:, :, keys], all_keys)
        assert relative_error(merged.out_BNTH[:, :, rows], whole.out_BNTH) <= tolerance
        assert relative_error(merged.lse_BNT[:, :, rows], whole.lse_BNT) <= FP32_TENSOR


def differentiate_twice(mode: CpMode) -> str:
    core, layout = install(mode)
    tensors, documents = make_problem(Shape(4, 4))
    q, k, v, _ = (layout.take(x).requires_grad_() for x in tensors)
    out = core(q, k, v, core.build_mask(documents))
    (grad_q,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        grad_q.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives_are_refused(mode: CpMode) -> None:
    for message in run_ranks(differentiate_twice, 2, mode):
        assert "once_differentiable" in message


def warnings_of_installing(device_type: str, mode: CpMode) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    apply.logger.addHandler(handler)
    with torch.device("meta"):
        attention = Attention(AttentionConfig(8, 2, 1, 4), SDPACore())
    apply_context_parallel(attention, mode, init_device_mesh(device_type, (dist.get_world_size(),)))
    return messages


@pytest.mark.parametrize(
    ("device_type", "mode", "is_warned"), [("meta", "ring", True), ("meta", "ulysses", False), ("cpu", "ring", False)]
)
def test_ring_off_the_cpu_is_warned_of_once(device_type: str, mode: CpMode, is_warned: bool) -> None:
    for messages in run_ranks(warnings_of_installing, 1, device_type, mode):
        assert len(messages) == is_warned
        assert all("no fused attention kernel on meta" in message for message in messages)


@pytest.mark.parametrize("is_head_tail", [False, True])
def test_shares_cover_the_sequence_once_and_are_brought_back_in_order(is_head_tail: bool) -> None:
    x = torch.arange(2 * 24).reshape(2, 24)
    layouts = [SequenceLayout(3, rank, is_head_tail) for rank in range(3)]
    assert relative_error(layouts[0].restore(torch.cat([layout.take(x) for layout in layouts], dim=1)), x) == EXACT


def test_head_tail_gives_every_rank_equally_many_causal_pairs() -> None:
    pairs = [int((SequenceLayout(4, rank, True).take(torch.arange(32)[None]) + 1).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1
