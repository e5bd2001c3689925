"""A job's model, optimizer and step on this rank, with a checkpoint folder: for tests of what is stored where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.checkpoint.training_state import view_training_state
from torchtrain.config.load import load_job
from torchtrain.config.observation import CheckpointConfig
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.optim.build import build_optimizer
from torchtrain.testing.shares import split_batch, whole_tensor
from torchtrain.trainer.run import Run, build_model


class StoredRun:
    """One run on this rank; whole tensors by checkpoint name are what tests compare."""

    def __init__(
        self, *overrides: str, folder: Path | None = None, resume: str | None = None, frozen: Sequence[str] = ()
    ) -> None:
        self.job = job = load_job(None, [*MODEL, *overrides])
        topology = Topology.resolve(job, dist.get_world_size())
        architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
        self.meshes = build_meshes(topology, torch.device("cpu"))
        spec = load_spec(job.model.name)

        def build(architecture: Any) -> nn.Module:
            model = spec.build(architecture)
            for fqn in frozen:
                model.get_parameter(fqn).requires_grad_(False)
            return model

        run = Run(job, replace(spec, build=build), architecture, self.meshes, is_main=False)
        rank_model = build_model(run)
        self.model = rank_model.module
        self.optimizer = build_optimizer(
            self.model,
            job.optimizer,
            device=self.meshes.device,
            trusted_targets=job.trusted_targets,
            is_stage=topology.pp_size > 1,
        )
        self.step = build_train_step(job, rank_model, self.optimizer, self.meshes)
        self.checkpointer = Checkpointer(CheckpointConfig(resume=resume), folder or Path())
        self.num_steps = 0
        self.gradients: list[dict[str, Tensor]] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradients()))

    def train(self, num_steps: int) -> list[float]:
        """Run steps on made-up batches; returns losses and norms in turn."""
        scalars = []
        for _ in range(num_steps):
            training = self.job.training
            whole = make_global_batch(self.num_steps, training.global_batch_size, training.seq_len)
            shares = split_batch(whole, self.meshes.dp_rank, self.meshes.topology.dp_size, training.micro_batch_size)
            self.num_steps += 1
            result = self.step.run(self.num_steps, shares, whole.num_valid_tokens())
            scalars += [result.loss, result.grad_norm]
        return scalars

    def save(self) -> None:
        self.checkpointer.save(self.num_steps, self.model, self.optimizer, {"step": self.num_steps})

    def resume(self) -> None:
        state = self.checkpointer.resume(self.model, self.optimizer)
        assert state is not None
        self.num_steps = state["step"]

    def live_tensors(self) -> dict[str, Tensor]:
        """Weights, main parameters and optimizer state as they lie on this rank."""
        tensors = view_training_state(self.model, self.optimizer).tensors
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}

    def whole_tensors(self) -> dict[str, Tensor]:
        """The same, gathered."""
        return {n: whole_tensor(t) for n, t in view_training_state(self.model, self.optimizer).tensors.items()}

    def _gradients(self) -> dict[str, Tensor]:
        return {fqn: whole_tensor(p.grad) for fqn, p in self.model.named_parameters() if p.grad is not None}
