"""A tiny model with odd sizes and a tied head, on the topologies that checkpoints travel between."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.checkpoint.training_state import view_training_state
from torchtrain.config.observation import CheckpointConfig
from torchtrain.config.optimization import OptimizerConfig
from torchtrain.optim.build import build_optimizer

MESH_SHAPES = {"plain": None, "fsdp2": (2,), "fsdp4": (4,), "hsdp2x2": (2, 2)}
WORLD_SIZES = {"plain": 1, "fsdp2": 2, "fsdp4": 4, "hsdp2x2": 4}


class OddModel(nn.Module):
    """13 rows over 4 ranks are 4, 4, 4, 1; 5 rows are 2, 2, 1, 0."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.down = nn.Linear(6, width)
        self.up = nn.Linear(width, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, ids: Tensor) -> Tensor:
        # The noise makes a generator that was not restored visible in the loss.
        x = self.embed(ids) + 0.1 * torch.rand(6)
        return self.head(x + self.up(torch.tanh(self.down(x)))) + (self.offset * self.frozen).sum()


class Run:
    """A model, its optimizer and its checkpointer."""

    def __init__(
        self,
        topology: str,
        folder: Path,
        *,
        width: int = 5,
        seed: int = 0,
        target: str = "",
        fp32_main_params: bool = False,
        **keys: object,
    ):
        torch.manual_seed(seed)
        self.model = OddModel(width)
        shape = MESH_SHAPES[topology]
        if shape is not None:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
            for module in (self.model.down, self.model.up, self.model):
                fully_shard(module, mesh=mesh)
        optimizer_config = OptimizerConfig(
            lr=1e-2, fp32_main_params=fp32_main_params, **({"target": target} if target else {})
        )
        self.optimizer = build_optimizer(
            self.model, optimizer_config, device=torch.device("cpu"), trusted_targets=("tests",)
        )
        self.checkpointer = Checkpointer(CheckpointConfig(**keys), folder)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        """Step on one fixed batch; returns the losses."""
        ids = torch.arange(12).reshape(2, 6)
        losses = []
        for _ in range(steps):
            loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self) -> None:
        self.checkpointer.save(self.step, self.model, self.optimizer, {"step": self.step, "note": "kept"})

    def whole_tensors(self) -> dict[str, Tensor]:
        """Every weight and optimizer tensor, gathered."""
        tensors = view_training_state(self.model, self.optimizer).tensors
        return {k: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for k, t in tensors.items()}


def save_after_training(topology: str, folder: Path, *, steps: int = 3, **keys: object) -> dict[str, Tensor]:
    """Train, save, and return what the checkpoint must hold."""
    run = Run(topology, folder, **keys)
    run.train(steps)
    with torch.no_grad():  # As an evaluation does: it leaves the root's parameters unsharded.
        run.model(torch.arange(6))
    run.save()
    run.checkpointer.wait()
    return run.whole_tensors()


def load_elsewhere(topology: str, path: Path, folder: Path, **keys: object) -> tuple[dict, dict[str, Tensor]]:
    """Load into a model that started from other weights; return the state and every tensor."""
    run = Run(topology, folder, seed=1, resume=str(path), **keys)
    state = run.checkpointer.resume(run.model, run.optimizer)
    assert run.model.head.weight is run.model.embed.weight
    dist.barrier()
    return state, run.whole_tensors()
