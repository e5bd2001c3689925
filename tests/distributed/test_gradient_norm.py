"""The global norm on sharded, replicated, plain and low-precision gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from torchtrain.distributed.gradient_norm import clip_coefficient, global_gradient_norm, scale_gradients
from torchtrain.testing.ranks import run_ranks

CPU = torch.device("cpu")


def _parameter(gradient: torch.Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


def norm_of_mixed_placements(p: float) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    # Every element is 1, so the norm is the p-th root of the number of logical elements: 5 * 3 + 7 + 4.
    odd = distribute_tensor(torch.ones(5, 3), mesh, [Replicate(), Shard(0)])
    whole = distribute_tensor(torch.ones(7), mesh, [Replicate(), Replicate()])
    return global_gradient_norm([_parameter(odd), _parameter(whole), _parameter(torch.ones(4))], CPU, p=p).item()


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0])
def test_every_logical_element_counts_once(p: float) -> None:
    assert run_ranks(norm_of_mixed_placements, 4, p) == [pytest.approx(26 ** (1 / p), rel=1e-6)] * 4


def test_low_precision_gradients_are_squared_in_fp32() -> None:
    # 300 squared overflows fp16, and in bf16 a sum of equal squares stops growing early.
    for dtype in (torch.float16, torch.bfloat16):
        norm = global_gradient_norm([_parameter(torch.full((10_000,), 300.0, dtype=dtype))], CPU)
        assert norm.item() == pytest.approx(float(torch.tensor(300.0, dtype=dtype)) * 100, rel=1e-5)


def test_no_gradient_is_norm_zero_and_clips_nothing() -> None:
    norm = global_gradient_norm([nn.Parameter(torch.ones(3))], CPU)
    assert norm.item() == 0.0
    assert clip_coefficient(norm, 1.0).item() == 1.0


def test_clipping_brings_the_norm_down_to_its_limit_and_never_up() -> None:
    parameter = _parameter(torch.tensor([3.0, 4.0]))
    scale_gradients([parameter], clip_coefficient(global_gradient_norm([parameter], CPU), 1.0))
    assert global_gradient_norm([parameter], CPU).item() == pytest.approx(1.0, rel=1e-5)
    assert clip_coefficient(torch.tensor(0.5), 1.0).item() == 1.0


def test_non_finite_gradient_is_not_hidden() -> None:
    assert math.isinf(global_gradient_norm([_parameter(torch.tensor([math.inf]))], CPU).item())
    assert math.isnan(global_gradient_norm([_parameter(torch.tensor([math.nan]))], CPU).item())


def norm_of_many_elements() -> float:
    gradient = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    norm = global_gradient_norm([_parameter(gradient)], CPU).item()
    return abs(norm / gradient.double().norm().item() - 1)


def test_norm_of_ten_million_elements_is_right_to_fp32() -> None:
    # One sum in sequence is 4e-4 off.
    assert run_ranks(norm_of_many_elements, 1)[0] < 1e-6
