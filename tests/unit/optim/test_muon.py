"""Muon on plain tensors, its groups, and the plan of who owns which matrix."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrain.config.optimization import OptimizerConfig
from torchtrain.errors import ConfigError
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.matrix_exchange import Layout, MatrixExchange, plan_owners
from torchtrain.optim.muon import Muon
from torchtrain.optim.newton_schulz import orthogonalize, orthogonalize_all
from torchtrain.optim.schedule import set_lr
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import BF16_SCALAR, FP32_SCALAR

CPU = torch.device("cpu")
TARGET = "torchtrain.optim.muon.Muon"


class TinyModel(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.proj = nn.Linear(4, 6)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))
        self.norm = nn.RMSNorm(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(4, 7, bias=False)
        if is_tied:
            self.lm_head.weight = self.embed_tokens.weight


def config(**keys: object) -> OptimizerConfig:
    return OptimizerConfig(target=TARGET, **keys)


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, float], set[str]]:
    return {
        (group["algorithm"], group["weight_decay"]): {
            fqn for fqn, p in model.named_parameters() if any(p is q for q in group["params"])
        }
        for group in optimizer.param_groups
    }


def test_matrices_and_stacks_go_to_muon_and_the_rest_to_adamw() -> None:
    model = TinyModel()
    assert groups_of(model, build_optimizer(model, config(), device=CPU)) == {
        ("muon", 0.1): {"proj.weight", "experts"},
        ("adamw", 0.1): {"embed_tokens.weight", "lm_head.weight"},
        ("adamw", 0.0): {"proj.bias", "norm.weight"},
    }


def test_patterns_choose_what_adamw_steps_and_know_a_tied_parameter_by_each_name() -> None:
    model = TinyModel(is_tied=True)
    options = {"adamw_params": ["lm_head.weight", "norm.weight", "*.bias", "experts"]}
    grouped = groups_of(model, build_optimizer(model, config(options=options), device=CPU))
    assert grouped["muon", 0.1] == {"proj.weight"}
    assert grouped["adamw", 0.1] == {"embed_tokens.weight", "experts"}


def test_every_fault_of_the_groups_is_listed_with_the_way_out() -> None:
    options = {"adamw_params": ["lm_hed.weight", "embed_tokens.weight", "*.bias"], "adamw_lr": -1.0, "ns_step": 3}
    with pytest.raises(ConfigError) as caught:
        build_optimizer(TinyModel(), config(options=options), device=CPU)
    said = {(fault.path, fault.fix) for fault in caught.value.faults}
    path = "optimizer.options.adamw_params"
    assert said == {
        (path, "did you mean lm_head.weight?"),
        (path, 'add "norm.weight", or a pattern that matches it'),
        ("optimizer.options.adamw_lr", "leave it out to use optimizer.lr"),
        ("optimizer.options.ns_step", 'did you mean "ns_steps"?'),
    }
    assert "leaves norm.weight of shape [4] to Muon" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adamw_params": "*.bias"}, "must be a list of fqn patterns"),
        ({"adamw_params": ["*"]}, "leaves no parameter to Muon"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"ns_steps": 0}, "ns_steps must be at least 1"),
        ({"ns_dtype": "float16"}, "ns_dtype must be null or one of float32, bfloat16"),
    ],
)
def test_a_wrong_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*", r"\*")):
        build_optimizer(TinyModel(), config(options=options), device=CPU)


def test_adamw_lr_follows_the_schedule_of_lr() -> None:
    optimizer = build_optimizer(TinyModel(), config(lr=1e-2, options={"adamw_lr": 1e-3}), device=CPU)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-3, 1e-3]
    set_lr(optimizer, 5e-3)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([5e-3, 5e-4, 5e-4])


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("nesterov", [True, False])
def test_matrices_step_like_torch_muon_and_the_rest_like_torch_adamw(nesterov: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = TinyModel(), TinyModel()
    theirs.load_state_dict(ours.state_dict())
    keys = {"lr": 1e-2, "fused": False, "options": {"ns_dtype": "bfloat16", "nesterov": nesterov}}
    optimizers = [build_optimizer(ours, config(**keys), device=CPU)]
    # torch's Muon takes no stacks: each expert is a matrix of its own there.
    experts = [nn.Parameter(expert.detach().clone()) for expert in theirs.experts]
    muon = torch.optim.Muon(
        [theirs.proj.weight, *experts], lr=1e-2, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    embeddings = {"params": [theirs.embed_tokens.weight, theirs.lm_head.weight]}
    small = {"params": [theirs.proj.bias, theirs.norm.weight], "weight_decay": 0.0}
    adamw = torch.optim.AdamW([embeddings, small], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=False)
    for step in range(4):
        for model in (ours, theirs):
            give_gradients(model, step)
        assert theirs.experts.grad is not None
        for expert, gradient in zip(experts, theirs.experts.grad, strict=True):
            expert.grad = gradient
        for optimizer in (*optimizers, muon, adamw):
            optimizer.step()
    assert relative_error(ours.proj.weight, theirs.proj.weight) < BF16_SCALAR
    assert relative_error(ours.experts, torch.stack(experts)) < BF16_SCALAR
    for fqn in ("embed_tokens.weight", "lm_head.weight", "proj.bias", "norm.weight"):
        assert torch.equal(ours.get_parameter(fqn), theirs.get_parameter(fqn))


@pytest.mark.parametrize("shape", [(8, 8), (4, 16), (16, 4), (5, 6, 3)])
def test_singular_values_come_near_one_and_singular_vectors_stay(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalize(matrix, steps=10)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    values = left.mT @ result @ right.mT
    diagonal = torch.diagonal(values, dim1=-2, dim2=-1)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all()
    assert relative_error(values, torch.diag_embed(diagonal)) < 1e-4


def test_a_zero_matrix_stays_zero_and_batches_equal_single_matrices() -> None:
    matrices = [torch.zeros(3, 4), torch.randn(3, 4), torch.randn(2, 2), torch.randn(3, 4)]
    results = orthogonalize_all(matrices, steps=5)
    assert torch.equal(results[0], matrices[0])
    for matrix, result in zip(matrices[1:], results[1:], strict=True):
        assert relative_error(result, orthogonalize(matrix, steps=5)) < FP32_SCALAR


def test_an_update_has_the_rms_of_adamw() -> None:
    parameter = nn.Parameter(torch.zeros(64, 256))
    optimizer = Muon([parameter], lr=1.0, weight_decay=0.0)
    parameter.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    assert parameter.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_state_travels_through_state_dict() -> None:
    torch.manual_seed(0)
    first, second = TinyModel(), TinyModel()
    optimizers = [build_optimizer(model, config(), device=CPU) for model in (first, second)]
    for step in range(2):
        give_gradients(first, step)
        optimizers[0].step()
    second.load_state_dict(first.state_dict())
    # torch does not copy what it loads.
    optimizers[1].load_state_dict(deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip((first, second), optimizers, strict=True):
        give_gradients(model, 2)
        optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_parameters_without_gradient_are_left_alone() -> None:
    one, other = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = Muon([one, other])
    for gradients in ((torch.eye(3), None), (torch.eye(3), torch.eye(3)), (None, torch.eye(3))):
        before = [one.detach().clone(), other.detach().clone()]
        one.grad, other.grad = gradients
        optimizer.step()
        for parameter, was, gradient in zip((one, other), before, gradients, strict=True):
            assert torch.equal(parameter, was) == (gradient is None)


def sharded_rows(rows: int, columns: int, ranks: range, *, num_stacked: int = 1) -> Layout:
    each = -(-rows // len(ranks))
    boxes = {
        rank: (slice(0, num_stacked), slice(min(i * each, rows), min((i + 1) * each, rows)), slice(0, columns))
        for i, rank in enumerate(ranks)
    }
    return Layout((num_stacked, rows, columns), boxes, dict.fromkeys(ranks, ()))


def test_owners_share_the_cost_evenly_and_are_the_same_every_time() -> None:
    layouts = [sharded_rows(rows, 32, range(4)) for rows in (64, 32, 32, 64, 16, 64, 32, 64, 16, 32)]
    matrices = plan_owners(layouts)
    assert matrices == plan_owners(layouts)
    load = Counter()
    for matrix in matrices:
        _, rows, columns = layouts[matrix.stack].shape_EMN
        load[matrix.owner] += rows * columns * min(rows, columns)
    assert len(load) == 4
    assert max(load.values()) <= 1.1 * sum(load.values()) / 4


def test_replicas_share_the_owners_and_whole_experts_stay_where_they_are() -> None:
    sharded = sharded_rows(8, 8, range(2))
    hsdp = Layout(
        sharded.shape_EMN,
        {rank: sharded.boxes[rank % 2] for rank in range(4)},
        {rank: (rank // 2,) for rank in range(4)},
    )
    matrices = plan_owners([hsdp] * 4)
    assert sorted(matrix.owner for matrix in matrices) == [0, 1, 2, 3]
    assert all({rank // 2 for rank in m.senders} == {m.owner // 2} and len(m.holders) == 4 for m in matrices)
    experts = Layout(
        (5, 4, 4),
        {r: (slice(min(2 * r, 5), min(2 * r + 2, 5)), slice(0, 4), slice(0, 4)) for r in range(4)},
        dict.fromkeys(range(4), ()),
    )
    assert [(m.owner, m.senders, m.holders) for m in plan_owners([experts])] == [
        (r, (r,), (r,)) for r in (0, 0, 1, 1, 2)
    ]


def test_ranks_without_a_row_own_nothing() -> None:
    owners = {matrix.owner for matrix in plan_owners([sharded_rows(2, 8, range(4))] * 6)}
    assert owners == {0, 1}


@pytest.mark.parametrize(
    "boxes",
    [
        {0: (slice(0, 1), slice(0, 4), slice(0, 6)), 1: (slice(0, 1), slice(5, 8), slice(0, 6))},
        {0: (slice(0, 1), slice(0, 5), slice(0, 6)), 1: (slice(0, 1), slice(4, 8), slice(0, 6))},
        {0: (slice(0, 1), slice(0, 8), slice(0, 3)), 1: (slice(0, 1), slice(0, 8), slice(0, 3))},
        {0: (slice(0, 1), slice(0, 4), slice(0, 3)), 1: (slice(0, 1), slice(4, 8), slice(3, 6))},
    ],
    ids=["gap", "overlap", "twice", "half_a_grid"],
)
def test_pieces_that_do_not_tile_their_matrix_are_refused(boxes: dict) -> None:
    with pytest.raises(AssertionError, match="do not make up"):
        plan_owners([Layout((1, 8, 6), boxes, {0: (), 1: ()})])


class CopiesBetweenDevices(TorchDispatchMode):
    """Counts them, and lets meta stand for an accelerator that hands zeros back."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and target is not None and target != args[0].device:
            self.counts[target.type] += 1
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=target)
        return func(*args, **kwargs)


def test_offloaded_matrices_travel_to_the_device_and_back_in_one_copy_each() -> None:
    shapes = ((3, 4, 5), (1, 6, 7), (1, 5, 5))
    layouts = [Layout((e, m, n), {0: (slice(0, e), slice(0, m), slice(0, n))}, {0: ()}) for e, m, n in shapes]
    exchange = MatrixExchange(layouts, rank=0, group=None, dtype=torch.bfloat16, device=torch.device("meta"))
    locals_ = [torch.randn(shape if shape[0] > 1 else shape[1:]) for shape in shapes]
    with CopiesBetweenDevices() as copies:
        wholes = exchange.gather(locals_)
        updates = list(exchange.scatter(wholes, locals_))
    assert {(whole.device.type, whole.dtype) for whole in wholes} == {("meta", torch.bfloat16)}
    assert len(updates) == 5
    assert all(update.device == target.device for _, target, update in updates)
    assert copies.counts == {"meta": 1, "cpu": 1}


def test_a_group_of_another_algorithm_and_a_vector_are_refused() -> None:
    with pytest.raises(ValueError, match='algorithm must be "muon" or "adamw"'):
        Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "algorithm": "sgd"}])
    with pytest.raises(ValueError, match=r"not a parameter of shape \[2\]"):
        Muon([nn.Parameter(torch.ones(2))])


def test_momentum_is_kept_like_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Muon([parameter])
    optimizer.step()
    momentum: Tensor = optimizer.state[parameter]["momentum_buffer"]
    assert (momentum.shape, momentum.dtype) == (parameter.shape, parameter.dtype)
