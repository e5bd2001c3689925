"""Expert parallelism against one rank: loss, norm, router, shared and routed experts, weights after three steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tests.distributed.stored_run import StoredRun
from tests.parity import harness
from tests.parity.harness import Outcome, SharedTopologies, one_rank, train_on_this_rank
from tests.parity.test_topologies import check
from torchtrain import parallelize
from torchtrain.distributed import gradient_norm
from torchtrain.distributed.expert_parallel import apply
from torchtrain.distributed.fsdp2 import manager
from torchtrain.distributed.meshes import Meshes
from torchtrain.nn import routing
from torchtrain.nn.moe import TokenDispatcher
from torchtrain.testing.ranks import run_ranks
from torchtrain.trainer import expert_loads, step


def model(**changes: object) -> tuple[str, ...]:
    """A dense layer between sparse ones with a shared expert; expert sizes that no shard size divides."""
    sizes = {
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 36,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_only_layers": "[1]",
        "router_aux_loss_coef": 0.05,
        "router_z_loss_coef": 0.01,
        "tie_word_embeddings": "false",
        **changes,
    }
    overrides = ", ".join(f"{name}: {value}" for name, value in sizes.items())
    # An expert that few tokens visit has gradients near AdamW's default epsilon, where its update is their rounding.
    return ("model.name=qwen3_moe", f"model.overrides={{{overrides}}}", "optimizer.eps=1e-4")


MODEL = model()
ALL_OF_FOUR = model(num_experts=4, num_experts_per_tok=4, shared_expert_intermediate_size=0)
BALANCED_OVER_BATCH = model(router_aux_loss_scope="batch")
BIASED = model(router_bias_update_rate=0.01, router_aux_loss_coef=0.0)
FOUR_LAYERS = model(num_hidden_layers=4)
ONE_LAYER = model(num_hidden_layers=1, mlp_only_layers="[]")

EP2, EP4 = "accelerator.ep_size=2", "accelerator.ep_size=4"
TP, SP = "accelerator.tp_size=2", "accelerator.sequence_parallel=true"
CP = "accelerator.cp_size=2"
PP = "accelerator.pp_size=2"
SHARD_2, EDP_SHARD_2 = "fsdp_config.dp_shard_size=2", "fsdp_config.edp_shard_size=2"


def micro(size: int) -> str:
    return f"training.micro_batch_size={size}"


CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "ep2_shard2": (4, MODEL, (EP2, EDP_SHARD_2, SHARD_2, micro(1), "fsdp_config.requires_grad_sync=false")),
    "ep2_replicate2": (4, MODEL, (EP2, "fsdp_config.dp_shard_size=4", micro(1))),
    "ep_is_experts_and_all_are_visited": (4, ALL_OF_FOUR, (EP4, SHARD_2, micro(2))),
    "ep2_without_fsdp": (2, MODEL, (EP2, TP, SP, micro(8))),
    "tp2_sp": (4, MODEL, (TP, SP, SHARD_2, micro(4))),
    "tp2": (2, MODEL, (TP, micro(8))),
    "ep2_tp2_sp": (4, MODEL, (EP2, TP, SP, EDP_SHARD_2, micro(4), "accelerator.loss_parallel=true")),
    "ep4_tp2_ragged": (4, (*MODEL, "training.seq_len=15"), (EP4, TP, SHARD_2, micro(1))),
    "ep2_cp2_ulysses": (4, MODEL, (EP2, CP, "accelerator.cp_mode=ulysses", SHARD_2, micro(4))),
    "ep4_cp2_allgather": (4, MODEL, (EP4, CP, "accelerator.cp_mode=allgather", micro(4))),
    "ep2_cp2_ring_tp2_sp": (4, MODEL, (EP2, CP, "accelerator.cp_mode=ring", TP, SP, EDP_SHARD_2, micro(8))),
    "ep2_pp2": (4, MODEL, (EP2, PP, micro(2))),
    "ep2_pp2_split_backward": (
        4,
        FOUR_LAYERS,
        (EP2, PP, micro(4), "accelerator.pp_micro_batch_size=1", "accelerator.pp_schedule=ZBVZeroBubble", SHARD_2),
    ),
    "ep2_hsdp_tp2_sp": (8, MODEL, (EP2, TP, SP, SHARD_2, EDP_SHARD_2, micro(2))),
    "balanced_over_batch": (4, BALANCED_OVER_BATCH, (EP2, CP, "accelerator.cp_mode=ring", micro(4))),
    "bias_update": (4, BIASED, (EP2, TP, SP, EDP_SHARD_2, micro(2))),
    "muon": (4, (*MODEL, "optimizer._target_=torchtrain.optim.muon.Muon"), (EP2, EDP_SHARD_2, SHARD_2, micro(2))),
    "recompute": (4, MODEL, (EP2, EDP_SHARD_2, micro(2), "activation_checkpoint.mode=full")),
    "recompute_with_exchange": (
        4,
        MODEL,
        (EP2, EDP_SHARD_2, micro(2), "activation_checkpoint={mode: selective_op, recompute_exchange: true}"),
    ),
    "compiled": (2, ONE_LAYER, (EP2, micro(4), "compile.enabled=true", "compile.backend=aot_eager")),
    "zero_copy": (4, MODEL, (EP2, EDP_SHARD_2, SHARD_2, micro(2), "fsdp_config.comm_fusion=true")),
}


RUNS = SharedTopologies({name: (size, (*numbers, *words)) for name, (size, numbers, words) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_expert_parallel_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    _, numbers, _ = CASES[name]
    check(RUNS.run(name, chosen_rows), one_rank(*numbers, micro(8)))


def twenty_steps(overrides: tuple[str, ...]) -> Outcome:
    harness.NUM_STEPS = 20
    harness.whole_gradients = lambda model: {}  # Gathering them takes as long as the steps.
    return train_on_this_rank(overrides)


def test_replicas_are_bitwise_equal_after_twenty_steps() -> None:
    # Two replicas of each expert, in pairs that exchange tokens, and four of all else, with other tokens each.
    first, *others = run_ranks(twenty_steps, 4, (*BIASED, EP2, micro(2)))
    assert len(first.losses) == 20
    for outcome in others:
        assert outcome.losses == first.losses
        for fqn, weight in first.weights.items():
            assert outcome.weights[fqn].equal(weight), fqn


def begin(overrides: tuple[str, ...], folder: Path) -> dict[str, Tensor]:
    run = StoredRun(*overrides, folder=folder)
    run.train(2)
    run.save()
    run.checkpointer.wait()
    return run.whole_tensors()


def pass_on(overrides: tuple[str, ...], source: Path, folder: Path) -> dict[str, Tensor]:
    run = StoredRun(*overrides, folder=folder, resume=str(source))
    run.resume()
    tensors = run.whole_tensors()
    run.save()
    run.checkpointer.wait()
    return tensors


def test_a_checkpoint_travels_between_expert_topologies_bit_for_bit(tmp_path: Path) -> None:
    numbers = (*BIASED, micro(1))
    expected = run_ranks(begin, 4, (*numbers, EP2, EDP_SHARD_2, SHARD_2), tmp_path / "0")[0]
    assert any(name.endswith("expert_bias") for name in expected)
    for stop, (world_size, technique) in enumerate(((1, ()), (4, (EP4, TP, SHARD_2))), start=1):
        source, folder = tmp_path / str(stop - 1) / "step_00000002", tmp_path / str(stop)
        for tensors in run_ranks(pass_on, world_size, (*numbers, *technique), source, folder):
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                assert tensor.equal(expected[name]), (stop, name)


def average_over_expert_replicas(overrides: tuple[str, ...]) -> Outcome:
    """Experts: reduced as a mean where all else is a sum, so that they are edp times off."""
    original = manager.set_sum_reduction

    def set_reduction(module: FSDPModule, divisor: float) -> None:
        original(module, divisor * 2 if type(module).__name__.endswith("RoutedExperts") else divisor)

    manager.set_sum_reduction = set_reduction
    return train_on_this_rank(overrides)


def sum_experts_over_ep_too(overrides: tuple[str, ...]) -> Outcome:
    """Experts: each rank has had the tokens of both ranks of ep already, and yet twice the gradient."""
    original = apply._local

    def local(weight: Tensor) -> Tensor:
        plain = original(weight)
        plain.register_hook(lambda gradient: gradient * 2)
        return plain

    apply._local = local
    return train_on_this_rank(overrides)


def reduce_dense_like_experts(overrides: tuple[str, ...]) -> Outcome:
    """Router and shared expert: reduced over the experts' data-parallel ranks, and never over ep."""
    original = Meshes.of_units
    Meshes.of_units = lambda self, name: original(self, "expert")
    return train_on_this_rank(overrides)


def never_reduce_over_cp(overrides: tuple[str, ...]) -> Outcome:
    """Dense parameters: summed over dp, where each cp rank saw other tokens too."""
    original = Meshes.of_units

    def of_units(self: Meshes, name: Any) -> DeviceMesh:
        return original(self, name) if name == "expert" else self.device_mesh["dp"]

    Meshes.of_units = of_units
    return train_on_this_rank(overrides)


def leave_router_partial_over_tp(overrides: tuple[str, ...]) -> Outcome:
    """Sequence parallel without expert parallel: the router learns from this rank's tokens only."""
    step.sum_partial_gradients = lambda model, tp_mesh: None
    return train_on_this_rank(overrides)


def count_replicas_in_norm(overrides: tuple[str, ...]) -> Outcome:
    """Norm: the experts' replicas counted each, and dense parameters likewise."""
    gradient_norm._shard_groups = lambda gradient: tuple(gradient.device_mesh.get_all_groups())
    return train_on_this_rank(overrides)


def send_tokens_from_every_tp_rank(overrides: tuple[str, ...]) -> Outcome:
    """Tensor parallel without sequence parallel: experts get each token once per tp rank."""

    def keep_whole(inner: TokenDispatcher, group: Any) -> TokenDispatcher:
        return inner

    apply.SplitTokens = keep_whole
    return train_on_this_rank(overrides)


def count_load_of_this_rank_only(overrides: tuple[str, ...]) -> Outcome:
    """Auxiliary loss: of the tokens that are here, not of the whole sequence."""

    def leave(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        return model

    parallelize.apply_load_counting = leave
    return train_on_this_rank(overrides)


def move_biases_by_own_load(overrides: tuple[str, ...]) -> Outcome:
    """Bias update: each rank from its own counts."""
    expert_loads.summing_over = lambda mesh, axes: lambda counts: counts
    return train_on_this_rank(overrides)


def route_anew_in_a_recomputation(overrides: tuple[str, ...]) -> Outcome:
    """Activation checkpointing: the router chooses again, and this time otherwise."""
    choose = routing.BestScores.__call__

    def choose_otherwise(self: routing.BestScores, scores_BTE: Tensor, num_choices: int) -> Tensor:
        is_recomputed = torch._C._current_graph_task_id() != -1
        return choose(self, scores_BTE.roll(1, dims=-1) if is_recomputed else scores_BTE, num_choices)

    def compute_anew(compute: Callable[[], Tensor]) -> Tensor:
        return compute()

    routing.BestScores.__call__ = choose_otherwise
    routing.keep = compute_anew
    return train_on_this_rank(overrides)


Mutation = Callable[[tuple[str, ...]], Outcome]
MUTATIONS: dict[Mutation, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    average_over_expert_replicas: (4, MODEL, (EP2, SHARD_2, micro(2))),
    sum_experts_over_ep_too: (2, MODEL, (EP2, micro(4))),
    reduce_dense_like_experts: (4, MODEL, (EP2, EDP_SHARD_2, micro(2))),
    never_reduce_over_cp: (4, MODEL, (EP2, CP, micro(4))),
    leave_router_partial_over_tp: (2, MODEL, (TP, SP, micro(8))),
    count_replicas_in_norm: (4, MODEL, (EP2, micro(2))),
    send_tokens_from_every_tp_rank: (2, MODEL, (EP2, TP, micro(8))),
    count_load_of_this_rank_only: (2, MODEL, (EP2, CP, micro(8))),
    move_biases_by_own_load: (2, BIASED, (EP2, micro(4))),
    route_anew_in_a_recomputation: (2, MODEL, (EP2, micro(4), "activation_checkpoint.mode=full")),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_law_turns_the_table_red(mutation: Mutation) -> None:
    world_size, numbers, technique = MUTATIONS[mutation]
    outcome = run_ranks(mutation, world_size, (*numbers, *technique))[0]
    with pytest.raises(AssertionError):
        check(outcome, one_rank(*numbers, micro(8)))


def test_loads_are_those_of_all_tokens_and_layers() -> None:
    (alone,) = run_ranks(report_loads, 1, (*MODEL, micro(8)))
    for technique in ((EP2, TP, SP, micro(4)), (EP2, PP, micro(2))):
        for reported in run_ranks(report_loads, 4, (*MODEL, *technique)):
            assert reported == alone
    assert list(alone) == ["layers.0.mlp.router", "layers.2.mlp.router"]
    assert all(sum(shares) == pytest.approx(1.0) for shares in alone.values())


def report_loads(overrides: tuple[str, ...]) -> dict[str, tuple[float, ...]]:
    kept: list[Any] = []
    original = step.TrainStep.run

    def run(self: step.TrainStep, *arguments: Any) -> step.StepResult:
        result = original(self, *arguments)
        kept.append({router: load.shares for router, load in result.expert_loads.items()})
        return result

    step.TrainStep.run = run
    harness.NUM_STEPS = 1
    train_on_this_rank(overrides)
    return kept[0]
