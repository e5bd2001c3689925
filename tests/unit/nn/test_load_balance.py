"""Auxiliary losses against formulas of their own, and the arithmetic of counts, biases and reports."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from torchtrain.nn.load_balance import (
    BalanceConfig,
    LoadCounter,
    attach_loss,
    auxiliary_loss,
    count_choices,
    measure_shares,
    report_load,
    step_bias,
    z_loss,
)
from torchtrain.nn.routing import Router, RouterConfig, set_auxiliary_loss_factor, take_loads
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_OUTPUT

CONFIG = RouterConfig(
    hidden_size=16, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True, balance=BalanceConfig()
)


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_choices_are_counted_per_sequence():
    ids_BTK = torch.tensor([[[0, 1], [1, 2]], [[2, 1], [2, 0]]])
    assert count_choices(ids_BTK, 4).tolist() == [[1, 2, 1, 0], [1, 1, 2, 0]]


def test_shares_are_of_a_sequence_or_of_all():
    counts_BE = torch.tensor([[4, 0], [1, 3]])
    assert measure_shares(counts_BE, LoadCounter(), "sequence", 1).tolist() == [[1.0, 0.0], [0.25, 0.75]]
    assert measure_shares(counts_BE, LoadCounter(), "batch", 1).tolist() == [[0.625, 0.375]]
    assert measure_shares(counts_BE, LoadCounter(), "batch", 2).sum() == 2
    assert measure_shares(0 * counts_BE, LoadCounter(), "batch", 2).tolist() == [[0.0, 0.0]]


def test_the_counter_adds_up_over_whom_it_is_told_to():
    counter = LoadCounter()
    counter.sum_over_sequence = lambda counts_BE: counts_BE + torch.tensor([[0, 4], [4, 0]])
    counter.sum_over_batch = lambda counts_E: counts_E + torch.tensor([0, 8])
    counts_BE = torch.tensor([[4, 0], [1, 3]])
    assert measure_shares(counts_BE, counter, "sequence", 1).tolist() == [[0.5, 0.5], [0.625, 0.375]]
    assert measure_shares(counts_BE, counter, "batch", 1).tolist() == [[0.3125, 0.6875]]


def test_the_auxiliary_loss_is_least_when_the_load_is_even():
    even = torch.full((1, 8, 4), 0.25)
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 8, 4)
    even_loss = auxiliary_loss(even, torch.full((1, 4), 0.5), coef=0.1)
    assert even_loss.item() == pytest.approx(0.1 * 2 * 8)
    assert auxiliary_loss(skewed, torch.tensor([[1.7, 0.1, 0.1, 0.1]]), coef=0.1) > 2 * even_loss


def test_the_z_loss_is_the_square_of_the_log_of_the_sum():
    logits_BTE = torch.randn(2, 3, 5)
    expected = sum(math.log(sum(math.exp(z) for z in row)) ** 2 for row in logits_BTE.flatten(0, 1).tolist())
    assert z_loss(logits_BTE, 0.5).item() == pytest.approx(0.5 * expected, rel=1e-5)


def test_an_attached_loss_adds_its_gradient_and_nothing_else():
    x = torch.randn(3, requires_grad=True)
    carrier = torch.randn(4, requires_grad=True)
    carried = attach_loss(carrier, x.square().sum(), 0.5)
    (3 * carried.sum()).backward()
    assert torch.equal(carried, carrier)
    assert torch.equal(carrier.grad, torch.full((4,), 3.0))
    assert torch.equal(x.grad, x.detach())


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_sequence_scope_does_not_depend_on_what_goes_forward_together(norm_topk_prob):
    balance = BalanceConfig(aux_loss_coef=0.3, z_loss_coef=0.2)
    router = Router(replace(CONFIG, norm_topk_prob=norm_topk_prob, balance=balance))
    router.weight.data.normal_()
    set_auxiliary_loss_factor(router, 0.1)
    x_BTD = torch.randn(4, 7, 16)
    gradients = []
    for parts in ([x_BTD], x_BTD.split(1)):
        router.weight.grad = None
        for part in parts:
            router(part).weights_NK.square().sum().backward()
        gradients.append(router.weight.grad)
    assert relative_error(gradients[1], gradients[0]) <= MODEL_OUTPUT
    assert take_loads(router)[""].sum() == 2 * 4 * 7 * 2


def test_the_factor_scales_the_balance_losses_alone():
    router = Router(replace(CONFIG, balance=BalanceConfig(aux_loss_coef=0.3)))
    router.weight.data.normal_()
    x_BTD, gradients = torch.randn(2, 7, 16), {}
    for factor in (0.0, 1.0, 2.0):
        set_auxiliary_loss_factor(router, factor)
        gradients[factor] = torch.autograd.grad(router(x_BTD).weights_NK.square().sum(), router.weight)[0]
    assert gradients[0.0].any()
    assert relative_error(gradients[2.0] - gradients[0.0], 2 * (gradients[1.0] - gradients[0.0])) <= MODEL_OUTPUT
    assert (gradients[1.0] - gradients[0.0]).any()


def test_the_bias_steps_against_the_load():
    moved_E = step_bias(torch.tensor([0.0, 0.5, -0.5]), torch.tensor([9, 3, 6]), rate=0.25)
    assert moved_E.tolist() == [-0.25, 0.75, -0.5]


def test_a_report_says_how_even_the_load_is():
    even, one = report_load(torch.tensor([5, 5, 5, 5])), report_load(torch.tensor([0, 7, 0, 0]))
    assert (even.entropy, even.max_over_mean, even.shares) == (pytest.approx(1.0), 1.0, (0.25,) * 4)
    assert (one.entropy, one.max_over_mean, one.shares) == (0.0, 4.0, (0.0, 1.0, 0.0, 0.0))
    half = report_load(torch.tensor([3, 3, 0, 0]))
    assert half.entropy == pytest.approx(0.5)
    assert report_load(torch.tensor([0, 0])).shares == (0.0, 0.0)
