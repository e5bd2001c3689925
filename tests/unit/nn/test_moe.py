"""The layer with experts, its router and its dispatcher, on one device."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.load_balance import BalanceConfig
from torchtrain.nn.moe import LocalDispatcher, MoE, RoutedExperts
from torchtrain.nn.permutation import combine, sort_by_expert, spread
from torchtrain.nn.routing import (
    Router,
    RouterConfig,
    Routing,
    force_balanced_routing,
    take_loads,
    update_expert_biases,
)
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_TENSOR, MODEL_OUTPUT

CONFIG = RouterConfig(
    hidden_size=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, balance=BalanceConfig()
)


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def build_experts(num_experts=4):
    return randomised(RoutedExperts(num_experts, hidden_size=16, intermediate_size=8))


def build_moe(config=CONFIG):
    return randomised(MoE(router=Router(config), experts=RoutedExperts(config.num_experts, 16, 8)))


def one_by_one(x_ND, weights_NK, ids_NK, experts):
    """Every token through every expert it visits, alone."""
    rows = []
    for x_D, weights, ids in zip(x_ND, weights_NK, ids_NK.tolist(), strict=True):
        y_D = torch.zeros_like(x_D)
        for weight, index in zip(weights, ids, strict=True):
            gate_F, up_F = experts.gate_proj[index] @ x_D, experts.up_proj[index] @ x_D
            y_D = y_D + weight * (experts.down_proj[index] @ (F.silu(gate_F) * up_F))
        rows.append(y_D)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "ids",
    [
        [[0, 1], [2, 3], [1, 0], [3, 0], [2, 1]],
        [[2, 1], [1, 2], [2, 1], [2, 1], [1, 2]],  # two experts have no token
        [[3], [3], [3], [3], [3]],  # all but one have none
        [[0, 1, 2, 3]] * 5,  # everybody goes everywhere
    ],
)
def test_the_local_dispatcher_equals_one_token_at_a_time(ids):
    ids_NK, experts = torch.tensor(ids), build_experts()
    x_ND = torch.randn(5, 16, requires_grad=True)
    weights_NK = torch.rand(ids_NK.shape, requires_grad=True)
    inputs = [x_ND, weights_NK, *experts.parameters()]
    upstream_ND = torch.randn(5, 16)

    y_ND = experts(x_ND, Routing(weights_NK, ids_NK, 4), LocalDispatcher())
    expected_ND = one_by_one(x_ND, weights_NK, ids_NK, experts)

    assert relative_error(y_ND, expected_ND) <= MODEL_OUTPUT
    expected_gradients = torch.autograd.grad(expected_ND, inputs, upstream_ND)
    for actual, expected in zip(torch.autograd.grad(y_ND, inputs, upstream_ND), expected_gradients, strict=True):
        assert relative_error(actual, expected) <= MODEL_OUTPUT


def test_no_tokens_give_an_empty_result_and_zero_gradients():
    """A rank without tokens takes part in every collective: its gradients must be there."""
    moe = build_moe()
    x_BTD = torch.randn(0, 3, 16, requires_grad=True)
    y_BTD = moe(x_BTD)
    y_BTD.sum().backward()
    assert y_BTD.shape == (0, 3, 16)
    assert [parameter.grad.abs().sum().item() for parameter in moe.parameters()] == [0.0] * 4


def test_a_repeated_run_is_bit_identical():
    moe, x_BTD = build_moe(), torch.randn(2, 9, 16)
    runs = []
    for _ in range(2):
        y_BTD = moe(x_BTD)
        runs.append([y_BTD, *torch.autograd.grad(y_BTD.square().sum(), list(moe.parameters()))])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


def test_rows_of_nobody_reach_neither_the_result_nor_a_gradient():
    experts, x_RD = build_experts(), torch.randn(8, 16)
    x_RD[5:] = float("nan")
    x_RD.requires_grad_()
    y_RD = experts.compute(x_RD, torch.tensor([2, 2, 4, 5], dtype=torch.int32))
    y_RD.sum().backward()
    assert y_RD.isfinite().all()
    assert not y_RD[5:].any()
    assert x_RD.grad is not None
    assert not x_RD.grad[5:].any()
    assert all(parameter.grad.isfinite().all() for parameter in experts.parameters())


def test_tokens_come_back_from_their_rows():
    ids_NK = torch.tensor([[3, 0], [1, 3], [0, 1]])
    order = sort_by_expert(ids_NK, num_experts=5)
    x_ND = torch.arange(3.0)[:, None]
    assert order.offsets_E.tolist() == [2, 4, 4, 6, 6]
    assert order.offsets_E.dtype == torch.int32
    assert spread(x_ND, order).flatten().tolist() == [0, 2, 1, 2, 0, 1]
    assert combine(spread(x_ND, order), torch.tensor([[1.0, 2.0]] * 3), order).flatten().tolist() == [0, 3, 6]


def test_weights_are_combined_in_fp32_and_rounded_once():
    ids_NK = torch.tensor([[0, 1, 2, 3]] * 6)
    order = sort_by_expert(ids_NK, num_experts=4)
    y_RD, weights_NK = torch.randn(24, 16).bfloat16(), torch.rand(6, 4)
    exact_ND = (y_RD.double()[order.rows_R].view(6, 4, 16) * weights_NK.double()[..., None]).sum(dim=1)
    assert torch.equal(combine(y_RD, weights_NK, order), exact_ND.bfloat16())


@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_router_picks_the_best_and_weighs_by_softmax(is_normalised):
    router = randomised(Router(replace(CONFIG, norm_topk_prob=is_normalised)))
    x_BTD = torch.randn(2, 5, 16)
    routing = router(x_BTD)
    scores_NE = (x_BTD @ router.weight.T).flatten(0, 1).softmax(dim=-1)
    best = scores_NE.sort(dim=-1, descending=True)
    expected_NK = best.values[:, :2] / (best.values[:, :2].sum(dim=-1, keepdim=True) if is_normalised else 1)
    assert torch.equal(routing.expert_ids_NK, best.indices[:, :2])
    assert relative_error(routing.weights_NK, expected_NK) <= MODEL_OUTPUT


@pytest.mark.parametrize("has_autocast", [True, False])
def test_a_router_decides_in_fp32(has_autocast):
    """Two experts whose logits differ by less than bf16 can tell."""
    router = Router(replace(CONFIG, num_experts_per_tok=1))
    x_BTD = torch.ones(1, 1, 16)
    with torch.no_grad():
        router.weight.zero_()
        router.weight[1, :2] = torch.tensor([4.0, 0.0])
        router.weight[2, :2] = torch.tensor([4.0, 0.0078125])
    if not has_autocast:
        router, x_BTD = router.bfloat16(), x_BTD.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
        routing = router(x_BTD)
    assert routing.weights_NK.dtype == torch.float32
    assert routing.expert_ids_NK.tolist() == [[2]]


def test_a_router_keeps_its_input_for_backward_as_it_came():
    router = randomised(Router(CONFIG)).bfloat16()
    x_BTD = torch.randn(2, 30, 16).bfloat16().requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        routing = router(x_BTD)
    assert max(tensor.untyped_storage().nbytes() for tensor in kept) == x_BTD.untyped_storage().nbytes()

    upstream_NK = torch.randn_like(routing.weights_NK)
    actual = torch.autograd.grad(routing.weights_NK, [x_BTD, router.weight], upstream_NK)
    full = [tensor.detach().float().requires_grad_() for tensor in (x_BTD, router.weight)]
    probabilities_BTE = F.linear(*full).softmax(dim=-1)
    weights_NK = probabilities_BTE.flatten(0, 1).gather(-1, routing.expert_ids_NK)
    weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
    for gradient, expected in zip(actual, torch.autograd.grad(weights_NK, full, upstream_NK), strict=True):
        assert torch.equal(gradient, expected.bfloat16())


def test_experts_of_no_probability_at_all_leave_finite_weights():
    router = Router(CONFIG)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4, 16))
    force_balanced_routing(router)
    x_BTD = torch.zeros(1, 1, 16)
    x_BTD[..., 3] = 300.0  # the first two, whose turn it is, round to 0
    weights_NK = router(x_BTD.requires_grad_()).weights_NK
    (1e6 * weights_NK).sum().backward()
    assert weights_NK.tolist() == [[0.0, 0.0]]
    assert x_BTD.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()


def test_a_routing_is_opaque_to_those_who_cast_the_contents_of_containers():
    """FSDP's ``cast_forward_inputs`` walks dataclasses and pytrees; it must not round weights to bf16."""
    routing = Router(CONFIG)(torch.randn(1, 3, 16))
    assert torch.utils._pytree.tree_leaves(routing) == [routing]
    assert not is_dataclass(routing)


def test_the_bias_moves_the_choice_and_leaves_the_weights():
    router = randomised(Router(replace(CONFIG, norm_topk_prob=False, balance=BalanceConfig(bias_update_rate=0.1))))
    x_BTD = torch.randn(1, 6, 16)
    router.expert_bias[3] = 10.0
    routing = router(x_BTD)
    scores_NE = (x_BTD[0] @ router.weight.T).softmax(dim=-1)
    assert (routing.expert_ids_NK == 3).any(dim=-1).all()
    assert relative_error(routing.weights_NK, scores_NE.gather(-1, routing.expert_ids_NK)) <= MODEL_OUTPUT


def test_the_bias_stays_in_fp32_and_begins_at_zero():
    config = replace(CONFIG, balance=BalanceConfig(bias_update_rate=0.1))
    router = Router(config)
    router.expert_bias.fill_(1 / 3)
    stored = router.bfloat16()
    assert stored.weight.dtype == torch.bfloat16
    assert torch.equal(stored.expert_bias, torch.full((4,), 1 / 3))
    with torch.device("meta"):
        model = nn.Sequential(Router(config))
    model.to(torch.bfloat16).to_empty(device="cpu")
    assert torch.equal(model[0].expert_bias, torch.zeros(4))
    assert "0.expert_bias" in model.state_dict()
    assert "expert_bias" not in Router(CONFIG).state_dict()


def test_the_bias_is_moved_towards_an_even_load_over_steps():
    config = replace(CONFIG, balance=BalanceConfig(bias_update_rate=0.002))
    model = nn.Sequential(build_moe(config))
    with torch.no_grad():
        model[0].router.weight.normal_(std=0.1)[0] += 0.05
    x_BTD = torch.randn(4, 64, 16) + 0.5
    spreads = []
    for _ in range(150):
        model(x_BTD)
        loads = take_loads(model)
        spreads.append((loads["0.router"].max() - loads["0.router"].min()).item())
        update_expert_biases(model, loads)
    assert spreads[0] > 100
    assert max(spreads[-10:]) < 0.3 * spreads[0]


def test_loads_count_training_forwards_until_they_are_taken():
    model = nn.Sequential(build_moe())
    for _ in range(2):
        model(torch.randn(2, 5, 16))
    with torch.no_grad():
        model(torch.randn(2, 5, 16))
    assert take_loads(model)["0.router"].sum() == 2 * 2 * 5 * 2
    assert take_loads(model)["0.router"].tolist() == [0, 0, 0, 0]


def test_forced_routing_is_even_and_still_differentiable():
    model = nn.Sequential(build_moe())
    force_balanced_routing(model)
    model(torch.randn(2, 6, 16)).sum().backward()
    assert take_loads(model)["0.router"].tolist() == [6, 6, 6, 6]
    assert model[0].router.weight.grad.any()


def test_the_shared_expert_is_added_by_its_gate():
    router, experts = Router(CONFIG), RoutedExperts(4, 16, 8)
    shared, gate = FeedForward(16, 12), nn.Linear(16, 1, bias=False)
    moe = randomised(MoE(router=router, experts=experts, shared_expert=shared, shared_expert_gate=gate))
    x_BTD = torch.randn(2, 5, 16)
    routed_BTD = MoE(router=router, experts=experts)(x_BTD)
    assert relative_error(moe(x_BTD), routed_BTD + torch.sigmoid(gate(x_BTD)) * shared(x_BTD)) <= MODEL_OUTPUT


def test_under_autocast_experts_compute_in_low_precision():
    moe, x_BTD = build_moe(), torch.randn(2, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y_BTD = moe(x_BTD)
    assert y_BTD.dtype == torch.bfloat16
    assert relative_error(y_BTD, moe(x_BTD)) <= BF16_TENSOR
    y_BTD.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in moe.parameters())


def test_a_meta_layer_runs_its_forward():
    with torch.device("meta"):
        moe, x_BTD = MoE(router=Router(CONFIG), experts=RoutedExperts(4, 16, 8)), torch.empty(2, 5, 16)
    assert moe(x_BTD).shape == (2, 5, 16)


def test_an_installed_dispatcher_is_used():
    class Doubling(LocalDispatcher):
        def run(self, x_ND, routing, experts):
            return 2 * super().run(x_ND, routing, experts)

    moe, x_BTD = build_moe(), torch.randn(2, 5, 16)
    plain_BTD = moe(x_BTD)
    moe.dispatcher = Doubling()
    assert torch.equal(moe(x_BTD), 2 * plain_BTD)
