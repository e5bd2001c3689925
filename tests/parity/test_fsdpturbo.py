"""The plugin fsdpturbo against one rank: loss, norm, every gradient and the weights after three steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.parity.harness import Outcome, SharedTopologies, one_rank, train_on_this_rank
from tests.parity.test_topologies import check
from torchtrain import parallelize
from torchtrain.distributed.fsdp2 import manager
from torchtrain.distributed.fsdpturbo import custom_shards
from torchtrain.distributed.fsdpturbo.plan import FSDPTurboPlan
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_TENSOR
from torchtrain.trainer import step

MOE = (
    "model.name=qwen3_moe",
    "model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 38, moe_intermediate_size: 12, "
    "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 4, "
    "num_experts_per_tok: 2, shared_expert_intermediate_size: 20, router_z_loss_coef: 0.01}",
)
CP_2 = "accelerator.cp_size=2"
CUSTOM = "dist_config.fsdp_implementation=custom"
RECOMPUTE = "activation_checkpoint.mode=full"
IGNORED = "dist_config.fsdp_ignored_modules=['*shared_expert*', 'layers.1.self_attn', 'norm']"
WHOLE_BATCH = "training.micro_batch_size=8"


def plugin(ep_size: int, dispatcher: str = "eager") -> tuple[str, ...]:
    return ("dist_config.name=fsdpturbo", f"dist_config.ep_size={ep_size}", f"dist_config.ep_dispatcher={dispatcher}")


# Shards of the dense path and those of the experts are chosen apart: dp_shard_size is the public key.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "efsdp1": (2, (*plugin(2), "training.micro_batch_size=4")),
    "efsdp2_accumulate": (4, (*plugin(2, "fused"), "fsdp_config.dp_shard_size=4", "training.micro_batch_size=1")),
    "cp2_efsdp1": (4, (*plugin(2, "domino"), CP_2, "fsdp_config.dp_shard_size=4", "training.micro_batch_size=4")),
    "cp2_efsdp2": (4, (*plugin(1), CP_2, "fsdp_config.dp_shard_size=2", "training.micro_batch_size=2")),
    "custom_efsdp2_recompute": (
        4,
        (*plugin(2), CUSTOM, "dist_config.hook_modules=['layers.*.mlp']", "training.micro_batch_size=1", RECOMPUTE),
    ),
    "custom_cp2_ignored": (
        4,
        (*plugin(1, "mc2"), CP_2, CUSTOM, "training.micro_batch_size=4", "fsdp_config.dp_shard_size=4", IGNORED),
    ),
}


RUNS = SharedTopologies({name: (size, (*MOE, *overrides)) for name, (size, overrides) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_fsdpturbo_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    check(RUNS.run(name, chosen_rows), one_rank(*MOE, WHOLE_BATCH))


def both_implementations(overrides: tuple[str, ...]) -> tuple[Outcome, Outcome]:
    return train_on_this_rank(overrides), train_on_this_rank((*overrides, CUSTOM))


def test_custom_sums_as_native_does() -> None:
    overrides = (*MOE, *plugin(2), "training.micro_batch_size=1", "fsdp_config.dp_shard_size=4")
    native, custom = run_ranks(both_implementations, 4, overrides)[0]
    assert custom.losses == native.losses
    for fqn, weight in native.weights.items():
        assert custom.weights[fqn].equal(weight), fqn


def leave_experts_unwrapped(overrides: tuple[str, ...]) -> Outcome:
    """Divisor: under the law of means, a loss times dp and units that divide by dp, experts in no unit at efsdp 1."""
    size = dist.get_world_size()
    manager.set_sum_reduction = lambda module, divisor: _sum_over(module, size)
    accumulate, plan = step.TrainStep._accumulate, parallelize.plan_fsdpturbo
    step.TrainStep._accumulate = lambda self, batches, tokens: accumulate(self, batches, tokens / size)
    balance = step.set_auxiliary_loss_factor
    step.set_auxiliary_loss_factor = lambda model, factor: balance(model, factor * size)
    parallelize.apply_fsdpturbo = lambda model, *_: model
    parallelize.plan_fsdpturbo = lambda *args, **kwargs: _ignore_experts(args[0], plan(*args, **kwargs))
    return train_on_this_rank(overrides)


def _sum_over(module: FSDPModule, divisor: float) -> None:
    module.set_gradient_divide_factor(divisor)
    module.set_force_sum_reduction_for_comms(True)


def _ignore_experts(model: nn.Module, plan: FSDPTurboPlan) -> FSDPTurboPlan:
    fqns = [fqn for fqn, _ in model.named_parameters() if fqn.rpartition(".")[0] in plan.expert_modules]
    return replace(plan, ignored_parameters=frozenset(fqns))


def never_reduce_over_cp(overrides: tuple[str, ...]) -> Outcome:
    """Reduce axis: experts forget that their cp ranks saw other tokens."""
    custom_shards.ExpertGroups.expert_cp = None
    return train_on_this_rank(overrides)


def swallow_the_shared_expert(overrides: tuple[str, ...]) -> Outcome:
    """Unit: the shared expert is taken for the routed ones', reduced over efsdp and never over ep."""
    plan_fsdpturbo = parallelize.plan_fsdpturbo

    def plan_and_swallow(model: nn.Module, *args: Any, **kwargs: Any) -> FSDPTurboPlan:
        fqns = {fqn for fqn, _ in model.named_parameters() if ".shared_expert." in fqn}
        plan = plan_fsdpturbo(model, *args, **kwargs)
        return replace(plan, ignored_parameters=plan.ignored_parameters | fqns)

    parallelize.plan_fsdpturbo = plan_and_swallow
    return train_on_this_rank(overrides)


MUTATIONS: dict[Callable[[tuple[str, ...]], Outcome], tuple[tuple[str, ...], str]] = {
    leave_experts_unwrapped: ((*plugin(2), "fsdp_config.dp_shard_size=2"), ".experts."),
    never_reduce_over_cp: ((*plugin(1), CP_2, CUSTOM), ".experts."),
    swallow_the_shared_expert: (plugin(2), ".shared_expert."),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_law_turns_the_table_red(mutation: Callable[[tuple[str, ...]], Outcome]) -> None:
    words, name = MUTATIONS[mutation]
    size = "8" if CP_2 in words else "4"
    outcome = run_ranks(mutation, 2, (*MOE, *words, f"training.micro_batch_size={size}"))[0]
    reference = one_rank(*MOE, WHOLE_BATCH)
    with pytest.raises(AssertionError):
        check(outcome, reference)
    # Clipped gradients of the first step: relative to one another, those named are wrong and the others right.
    factor = outcome.norms[0] / reference.norms[0]
    wrong = {
        fqn
        for fqn, gradient in reference.gradients[0].items()
        if relative_error(outcome.gradients[0][fqn] * factor, gradient) > FP32_TENSOR
    }
    assert wrong == {fqn for fqn in reference.gradients[0] if name in fqn}
