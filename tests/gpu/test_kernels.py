"""Every backend of every op that a real device has, against the eager one: results and gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from torchtrain.kernels.gated_delta_rule import (
    CHUNK_GATED_DELTA_RULE,
    FUSED_RECURRENT_GATED_DELTA_RULE,
    DeltaRuleProblem,
    recurrent,
)
from torchtrain.kernels.grouped_mm import GROUPED_MM, GroupedProblem, grouped_mm
from torchtrain.kernels.plugins import PLUGINS
from torchtrain.kernels.rms_norm import RMS_NORM, NormProblem, torch_rms_norm
from torchtrain.runtime.device import count_accelerators
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_TENSOR

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_accelerators() < 1, reason="needs an accelerator"),
]


def backends(op):
    for name in op.names():
        plugin = op.backend(name).plugin
        absent = plugin in PLUGINS and importlib.util.find_spec(PLUGINS[plugin].module) is None
        yield pytest.param(name, marks=pytest.mark.skipif(absent, reason=f"{plugin} is not installed"))


def device() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator() or "cpu")


def differentiate(function, inputs):
    out = function(*inputs)
    upstream = torch.ones_like(out) + torch.arange(out.shape[-1], device=out.device, dtype=out.dtype)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


def assert_alike(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours.float(), theirs.float()) <= BF16_TENSOR


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("backend", backends(CHUNK_GATED_DELTA_RULE))
def test_delta_rule_in_chunks(backend, is_packed, chunk_size):
    compare_delta_rule(CHUNK_GATED_DELTA_RULE.backend(backend), is_packed, chunk_size)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("backend", backends(FUSED_RECURRENT_GATED_DELTA_RULE))
def test_recurrent_delta_rule(backend, is_packed):
    compare_delta_rule(FUSED_RECURRENT_GATED_DELTA_RULE.backend(backend), is_packed, 64)


def compare_delta_rule(chosen, is_packed, chunk_size):
    torch.manual_seed(0)
    problem = DeltaRuleProblem(device().type, torch.bfloat16, key_size=64, chunk_size=chunk_size)
    if not chosen.is_able(problem):
        pytest.skip(f"{chosen.name} needs {chosen.conditions}")
    q, k = torch.randn(2, 2, 200, 2, 64, device=device(), dtype=torch.bfloat16)
    v = torch.randn(2, 200, 4, 64, device=device(), dtype=torch.bfloat16)
    log_decay = -F.softplus(torch.randn(2, 200, 4, device=device()))
    beta = torch.rand(2, 200, 4, device=device())
    inputs = [x.requires_grad_() for x in (q, k, v, log_decay, beta)]
    segments = (torch.arange(200, device=device()) // 70).expand(2, -1) if is_packed else None
    expected = differentiate(lambda *xs: recurrent(*xs, segments), inputs)
    actual = differentiate(lambda *xs: chosen.implementation(*xs, segments, chunk_size=chunk_size), inputs)
    assert_alike(actual, expected)


@pytest.mark.parametrize("backend", backends(RMS_NORM))
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(backend, offset):
    torch.manual_seed(0)
    chosen = RMS_NORM.backend(backend)
    if not chosen.is_able(NormProblem(device().type, torch.bfloat16)):
        pytest.skip(f"{backend} needs {chosen.conditions}")
    x = torch.randn(50, 256, device=device(), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(256, device=device(), dtype=torch.bfloat16, requires_grad=True)
    expected = differentiate(lambda *xs: torch_rms_norm(*xs, 1e-6, offset=offset), [x, weight])
    assert_alike(differentiate(lambda *xs: chosen.implementation(*xs, 1e-6, offset=offset), [x, weight]), expected)


@pytest.mark.parametrize("backend", backends(GROUPED_MM))
def test_grouped_mm(backend):
    torch.manual_seed(0)
    if not GROUPED_MM.backend(backend).is_able(GroupedProblem(device().type, torch.bfloat16, 4, (64, 32))):
        pytest.skip(f"{backend} needs {GROUPED_MM.backend(backend).conditions}")
    x = torch.randn(90, 64, device=device(), dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 64, device=device(), dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([30, 30, 71, 90], dtype=torch.int32, device=device())
    starts = [0, 30, 30, 71]

    def plain(x, weight):
        ends = offsets.tolist()
        return torch.cat([x[a:b] @ w.T for a, b, w in zip(starts, ends, weight, strict=True)])

    expected = differentiate(plain, [x, weight])
    assert_alike(
        differentiate(lambda *xs: grouped_mm(*xs, offsets, is_exact=True, backend=backend), [x, weight]), expected
    )
