"""A recomputed block sends its tokens where its forward sent them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.qwen3_moe.architecture import PRESETS
from models.qwen3_moe.model import build_qwen3_moe, init_rule
from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.config.training import ActivationCheckpointConfig
from torchtrain.distributed.materialize import initialize_parameters
from torchtrain.kernels.grouped_mm import GROUPED_MM_OPERATOR
from torchtrain.losses.cross_entropy import token_losses
from torchtrain.nn.recomputation import Memory, keep
from torchtrain.nn.routing import BestScores, routers, set_auxiliary_loss_factor, take_loads

ARCHITECTURE = replace(
    PRESETS["debug"],
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    mlp_only_layers=(1,),
    head_dim=8,
    num_experts=6,
    router_aux_loss_coef=0.1,
    router_z_loss_coef=0.1,
)
MODES = pytest.mark.parametrize("mode", ["full", "selective_op", "every_nth_block"])
INPUT_IDS_BT = torch.arange(48).remainder(50).view(3, 16)


class Recorder(BestScores):
    """Remembers every choice; a second one from the same scores would come out otherwise."""

    def __init__(self):
        self.calls = []

    def __call__(self, scores_BTE, num_choices):
        turned = scores_BTE.roll(len(self.calls), dims=-1)
        self.calls.append(super().__call__(turned, num_choices))
        return self.calls[-1]


def build(mode: Any, dtype: torch.dtype = torch.float32):
    torch.set_num_threads(1)
    model = build_qwen3_moe(ARCHITECTURE)
    initialize_parameters(model, lambda fqn: init_rule(ARCHITECTURE, fqn), seed=0)
    model = model.to(dtype)
    apply_activation_checkpoint(model, ActivationCheckpointConfig(mode=mode))
    set_auxiliary_loss_factor(model, 0.1)
    for _, router in routers(model):
        router.choice = Recorder()
    return model


def train(model):
    loss = token_losses(model(INPUT_IDS_BT), INPUT_IDS_BT).sum()
    loss.backward()
    return loss


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_and_gradients_are_bit_identical_and_tokens_are_routed_once(mode, dtype):
    plain, checkpointed = build("none", dtype), build(mode, dtype)
    assert torch.equal(train(plain), train(checkpointed))
    for (fqn, expected), (_, actual) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), fqn
    assert [len(router.choice.calls) for _, router in routers(checkpointed)] == [1, 1]


@MODES
def test_a_recomputed_forward_computes_with_the_choice_of_the_first(mode):
    model, seen = build(mode), []
    experts = model.layers["0"].mlp.experts
    experts.register_forward_pre_hook(lambda module, args: seen.append(args[1].expert_ids_NK))
    train(model)
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


@MODES
def test_a_recomputation_counts_no_token_twice(mode):
    plain, checkpointed = build("none"), build(mode)
    train(plain)
    train(checkpointed)
    expected, actual = take_loads(plain), take_loads(checkpointed)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[fqn], expected[fqn]) for fqn in actual)
    assert all(counts_E.sum() == 3 * 16 * 2 for counts_E in actual.values())


@MODES
def test_micro_batches_in_flight_keep_their_own_choices(mode):
    """A pipeline runs several forwards before the first backward."""
    models = build("none"), build(mode)
    for model in models:
        losses = [token_losses(model(rows), rows).sum() for rows in INPUT_IDS_BT.split(1)]
        for loss in losses:
            loss.backward()
    plain, checkpointed = models
    for (fqn, expected), (_, actual) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), fqn


def test_backward_may_pass_twice():
    plain, checkpointed = build("none"), build("full")
    for model in (plain, checkpointed):
        loss = token_losses(model(INPUT_IDS_BT), INPUT_IDS_BT).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for (fqn, expected), (_, actual) in zip(plain.named_parameters(), checkpointed.named_parameters(), strict=True):
        assert torch.equal(actual.grad, expected.grad), fqn


class ProductCounter(TorchDispatchMode):
    """Counts grouped products that are computed, in backward and in recomputation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is GROUPED_MM_OPERATOR
        return func(*args, **(kwargs or {}))


def test_selective_recomputes_no_grouped_product():
    counts = {}
    for mode in ("none", "full", "selective_op"):
        model = build(mode)
        loss = token_losses(model(INPUT_IDS_BT), INPUT_IDS_BT).sum()
        with ProductCounter() as counter:
            loss.backward()
        counts[mode] = counter.count
    # Two layers of three projections, each of which has one such product in backward.
    assert counts == {"none": 6, "full": 6 + 6, "selective_op": 6}


def test_without_a_memory_everything_is_computed():
    calls = []

    def compute():
        calls.append(None)
        return torch.tensor(len(calls))

    assert [int(keep(compute)), int(keep(compute))] == [1, 2]
    memory = Memory()
    with memory.recording():
        recorded = [int(keep(compute)), int(keep(compute))]
    for _ in range(2):
        with memory.replaying():
            assert [int(keep(compute)), int(keep(compute))] == recorded == [3, 4]
    assert len(calls) == 4
