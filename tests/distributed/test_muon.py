"""Muon on sharded parameters equals Muon on one rank, with two collectives a step, on every layout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.config.observation import CheckpointConfig
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.distributed.dtensor_internals import local_slices, slices_by_coordinate
from torchtrain.distributed.fsdp2.replicate import build_whole_placement
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.muon import Muon
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_SCALAR

NUM_STEPS = 4
LR, DECAY, MOMENTUM = 1e-2, 0.1, 0.95
# Odd on purpose: 5 rows over 4 ranks are 2, 2, 1, 0, and a stack of 6 is 2, 2, 2, 0.
SHAPES = ((16, 8), (5, 12), (9, 9), (3, 7), (6, 4, 5), (2, 8, 6))


def initial_weight(index: int) -> Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(index))


def gradient_of(index: int, step: int) -> Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(100 * (step + 1) + index))


def reference_weights() -> list[Tensor]:
    """Muon written down again, on whole matrices in fp64."""
    weights = []
    for index, shape in enumerate(SHAPES):
        weight, buffer = initial_weight(index).double(), torch.zeros(shape, dtype=torch.float64)
        for step in range(NUM_STEPS):
            gradient = gradient_of(index, step).double()
            buffer = MOMENTUM * buffer + (1 - MOMENTUM) * gradient
            direction = MOMENTUM * buffer + (1 - MOMENTUM) * gradient
            stack = direction if len(shape) == 3 else direction[None]
            update = torch.stack([polynomial(matrix) for matrix in stack]).reshape(shape)
            weight = weight - LR * DECAY * weight - LR * 0.2 * math.sqrt(max(shape[-2:])) * update
        weights.append(weight.float())
    return weights


def polynomial(matrix: Tensor) -> Tensor:
    """What five iterations do to the singular values, done to the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


def placements_of(layout: str, index: int) -> tuple[tuple[int, ...], list[Placement]]:
    """Mesh shape and placements of one parameter."""
    world = dist.get_world_size()
    match layout:
        case "shard_0":
            return (world,), [Shard(0)]
        case "shard_last":
            return (world,), [Shard(len(SHAPES[index]) - 1)]
        case "hsdp":
            return (2, world // 2), [Replicate(), Shard(0)]
        case "replicated":
            return (world,), [Replicate()]
        case "two_dims":  # As of experts sharded over ep, then inside over edp.
            return (2, world // 2), [Shard(1), Shard(0)]
        case "mixed":  # Whole parameters beside sharded ones, as with replicate_params.
            if index % 2:
                return (world, 1), [Replicate(), Shard(0)]
            return (world,), [Shard(0)]
    raise ValueError(layout)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count calls of torch.distributed's collectives by name."""
    counts: Counter[str] = Counter()
    names = ("all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "broadcast", "all_reduce")
    names += ("new_group",)
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str):
        def call(*args: object, **kwargs: object) -> object:
            counts[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def step_layout(layout: str, indices: Sequence[int]) -> tuple[list[Tensor], list[Tensor], Counter[str]]:
    """Whole weights, this rank's pieces, and the collectives of all steps."""
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    parameters = {}
    for index in indices:
        shape, placements = placements_of(layout, index)
        if shape not in meshes:
            names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
            meshes[shape] = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parameters[index] = nn.Parameter(distribute_tensor(initial_weight(index), meshes[shape], placements))
    optimizer = Muon(list(parameters.values()), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    with counted_collectives() as counts:
        for step in range(NUM_STEPS):
            for index, parameter in parameters.items():
                assert isinstance(parameter, DTensor)
                parameter.grad = distribute_tensor(
                    gradient_of(index, step), parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            optimizer.step()
    for parameter in parameters.values():
        momentum = optimizer.state[parameter]["momentum_buffer"]
        assert momentum.placements == parameter.placements
    tensors = [parameter.detach() for parameter in parameters.values()]
    return [t.full_tensor() for t in tensors], [t.to_local().clone() for t in tensors], counts


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", ["shard_0", "shard_last", "hsdp", "replicated", "two_dims", "mixed"])
def test_every_layout_equals_the_reference_with_two_collectives_a_step(layout: str, world_size: int) -> None:
    expected = reference_weights()
    for whole, _, counts in run_ranks(step_layout, world_size, layout, range(len(SHAPES))):
        for actual, weight in zip(whole, expected, strict=True):
            assert relative_error(actual, weight) < FP32_SCALAR
        # A whole matrix needs no gathering, only its result has to travel.
        num_exchanges = 1 if layout == "replicated" or (layout == "hsdp" and world_size == 2) else 2
        assert counts == {"all_to_all_single": num_exchanges * NUM_STEPS}


def test_replicas_stay_bitwise_equal() -> None:
    for layout, pairs in (("hsdp", ((0, 2), (1, 3))), ("replicated", ((0, 1), (0, 2), (0, 3)))):
        results = run_ranks(step_layout, 4, layout, range(len(SHAPES)))
        for one, other in pairs:
            for mine, theirs in zip(results[one][1], results[other][1], strict=True):
                assert torch.equal(mine, theirs)


def test_local_experts_need_no_communication() -> None:
    stacks = [index for index, shape in enumerate(SHAPES) if len(shape) == 3]
    expected = reference_weights()
    for whole, _, counts in run_ranks(step_layout, 4, "shard_0", stacks):
        assert counts == {}
        for index, actual in zip(stacks, whole, strict=True):
            assert relative_error(actual, expected[index]) < FP32_SCALAR


def shard_after_tp(whole: Tensor, mesh: DeviceMesh, tp_dim: int, *, is_whole: bool = False) -> nn.Parameter:
    """Lay a matrix out over tp by hand, then let FSDP shard its rows, or keep them whole on its ranks."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(tp_dim)]))
    placement = build_whole_placement(mesh["shard"]) if is_whole else Shard(0)
    fully_shard(module, mesh=mesh["shard"], shard_placement_fn=lambda _: placement)
    return cast(nn.Parameter, module.weight)


def step_under_tp_and_fsdp(tp_dim: int, whole: int) -> tuple[list[Tensor], list[Placement], Counter[str]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))

    def shard(index: int, tensor: Tensor) -> nn.Parameter:
        dim = 0 if tp_dim == 0 else tensor.ndim - 1
        return shard_after_tp(tensor, mesh, dim, is_whole=index == whole)

    parameters = {index: shard(index, initial_weight(index)) for index in range(len(SHAPES))}
    optimizer = Muon(list(parameters.values()), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    with counted_collectives() as counts:
        for step in range(NUM_STEPS):
            for index, parameter in parameters.items():
                # Sharded as a parameter is: what lies where is FSDP's doing, in both.
                parameter.grad = shard(index, gradient_of(index, step)).detach()
            optimizer.step()
    placements = [placement for parameter in parameters.values() for placement in cast(DTensor, parameter).placements]
    return [cast(DTensor, p.detach()).full_tensor() for p in parameters.values()], placements, counts


@pytest.mark.parametrize("tp_dim", [0, -1], ids=["rows_of_rows", "rows_of_columns"])
def test_matrices_sharded_over_tp_and_then_fsdp_equal_the_reference(tp_dim: int) -> None:
    expected = reference_weights()
    for whole, placements, counts in run_ranks(step_under_tp_and_fsdp, 4, tp_dim, 1):
        # Pieces of a rank's rows: torch's name for a shard whose place its plain arithmetic would get wrong.
        assert any(isinstance(placement, _StridedShard) for placement in placements) is (tp_dim == 0)
        for actual, weight in zip(whole, expected, strict=True):
            assert relative_error(actual, weight) < FP32_SCALAR
        assert counts["all_to_all_single"] == 2 * NUM_STEPS


def groups_made_in_a_stage() -> tuple[int, int, list[Tensor]]:
    """Two stages of two ranks, each with a mesh of two axes: nobody has a group of just those ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "replicate", "shard"))["replicate", "shard"]
    parameters = [
        nn.Parameter(distribute_tensor(initial_weight(index), mesh, [Replicate(), Shard(0)], src_data_rank=None))
        for index in range(3)
    ]
    with counted_collectives() as counts:
        optimizer = Muon(parameters, lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
        num_made = counts["new_group"]
        for step in range(NUM_STEPS):
            for index, parameter in enumerate(parameters):
                has_gradient = step % 2 == 0 or index != 1
                gradient = distribute_tensor(gradient_of(index, step), mesh, parameter.placements, src_data_rank=None)
                parameter.grad = gradient if has_gradient else None
            optimizer.step()
    return num_made, counts["new_group"], [parameter.detach().full_tensor() for parameter in parameters]


def test_groups_are_made_with_the_optimizer_and_never_in_a_step() -> None:
    expected = reference_weights()
    for num_made, num_made_at_last, weights in run_ranks(groups_made_in_a_stage, 4):
        assert (num_made, num_made_at_last) == (1, 1)
        for index in (0, 2):
            assert relative_error(weights[index], expected[index]) < FP32_SCALAR


def slices_agree_with_this_rank() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Shard(0)]):
        tensor = distribute_tensor(torch.ones(5, 3), mesh, placements)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        boxes = slices_by_coordinate(tensor)
        assert boxes[tuple(coordinate)] == tuple(local_slices(tensor))
        assert torch.ones(5, 3)[boxes[tuple(coordinate)]].shape == tensor.to_local().shape


def test_the_layout_that_a_rank_expects_of_itself_is_the_one_it_has() -> None:
    run_ranks(slices_agree_with_this_rank, 4)


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(13, 6)
        self.down = nn.Linear(6, 5)
        self.up = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.lm_head = nn.Linear(6, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        return self.lm_head(self.norm(x + self.up(torch.tanh(self.down(x)))))


class TrainedModel:
    """The model under FSDP, HSDP or nothing, with the optimizer that a job names."""

    def __init__(self, topology: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = OddModel()
        world = dist.get_world_size()
        shape = {"plain": None, "fsdp": (world,), "hsdp": (2, world // 2)}[topology]
        if shape is not None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for module in (self.model.down, self.model.up, self.model):
                fully_shard(module, mesh=mesh)
        config = OptimizerConfig(target="torchtrain.optim.muon.Muon", lr=1e-2, options={"adamw_lr": 3e-3})
        self.optimizer = build_optimizer(self.model, config, device=torch.device("cpu"))

    def train(self, steps: int) -> None:
        ids = torch.arange(12).reshape(2, 6)
        for _ in range(steps):
            nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {
            fqn: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for fqn, p in self.model.named_parameters()
        }


def train_model(topology: str) -> dict[str, Tensor]:
    run = TrainedModel(topology)
    run.train(5)
    return run.weights()


@pytest.mark.parametrize(("topology", "world_size"), [("fsdp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_a_sharded_model_trains_as_on_one_rank(topology: str, world_size: int) -> None:
    (expected,) = run_ranks(train_model, 1, "plain")
    for weights in run_ranks(train_model, world_size, topology):
        for fqn, weight in weights.items():
            assert relative_error(weight, expected[fqn]) < FP32_SCALAR, fqn


def save_then_go_on(topology: str, folder: Path) -> dict[str, Tensor]:
    run = TrainedModel(topology)
    run.train(2)
    checkpointer = Checkpointer(CheckpointConfig(), folder)
    checkpointer.save(2, run.model, run.optimizer, {"step": 2})
    checkpointer.wait()
    run.train(2)
    return run.weights()


def resume_then_go_on(topology: str, folder: Path) -> dict[str, Tensor]:
    run = TrainedModel(topology, seed=1)
    Checkpointer(CheckpointConfig(resume="auto"), folder).resume(run.model, run.optimizer)
    run.train(2)
    return run.weights()


def test_a_checkpoint_resumes_on_another_topology(tmp_path: Path) -> None:
    expected = run_ranks(save_then_go_on, 4, "hsdp", tmp_path)[0]
    for topology, world_size in (("hsdp", 4), ("fsdp", 2), ("plain", 1)):
        for weights in run_ranks(resume_then_go_on, world_size, topology, tmp_path):
            for fqn, weight in weights.items():
                assert relative_error(weight, expected[fqn]) < FP32_SCALAR, (topology, fqn)
