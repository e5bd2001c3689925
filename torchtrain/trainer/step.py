"""One optimizer step: the gradient law, clipping and the update.

The law: loss = sum of token losses / global number of valid labels. Gradients are summed over every rank that saw
different tokens and divided by nothing else, so padding, ragged masks, empty ranks and any number of micro-batches come
out right by construction. See ``docs/numerics.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn

from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.distributed.gradient_norm import (
    clip_coefficient,
    global_gradient_norm,
    local_gradients,
    scale_gradients,
)
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.tensor_parallel.partial_gradients import sum_partial_gradients
from torchtrain.errors import NonFiniteError
from torchtrain.nn.load_balance import LoadReport
from torchtrain.nn.routing import set_auxiliary_loss_factor
from torchtrain.optim.loss_scaler import LossScaler
from torchtrain.trainer.expert_loads import ExpertLoads
from torchtrain.trainer.forward_backward import ForwardBackward
from torchtrain.trainer.losses_by_source import LossSums


@dataclass(frozen=True)
class StepResult:
    """What one step did; equal on every rank."""

    loss: float
    """Global token mean."""
    grad_norm: float
    """Before clipping."""
    loss_by_source: dict[str, float]
    expert_loads: dict[str, LoadReport] = field(default_factory=dict)
    """By the fqn of the router, of all layers with experts."""
    is_skipped: bool = False
    """The weights were left alone: fp16 gradients overflowed and the loss scale was halved."""


class TrainStep:
    """Turns micro-batches into one update of the weights."""

    def __init__(
        self,
        job: Job,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        forward_backward: ForwardBackward,
        meshes: Meshes,
        scaler: LossScaler | None,
        source_names: Sequence[str],
    ) -> None:
        self._max_grad_norm = job.training.max_grad_norm
        self._num_positions = job.training.global_batch_size * job.training.seq_len
        self._model = model
        self._optimizer = optimizer
        self._forward_backward = forward_backward
        self._meshes = meshes
        self._scaler = scaler
        self._source_names = source_names
        self._loads = ExpertLoads(model, meshes, is_sequence_parallel=job.accelerator.sequence_parallel)

    def run(self, step: int, micro_batches: Sequence[Batch], num_valid_tokens: float) -> StepResult:
        """Forward and backward over the micro-batches, then clip and update.

        Args:
            step: 1-based, for messages.
            micro_batches: This rank's share of the global batch, on its device.
            num_valid_tokens: Valid labels of the whole global batch; must not be 0.

        Raises:
            NonFiniteError: The loss or the norm is NaN or infinite; weights are as before the step.

        Collective: the whole world.
        """
        sums = self._accumulate(micro_batches, num_valid_tokens)
        parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
        scale = self._scaler.scale if self._scaler else 1.0
        norm = global_gradient_norm(parameters, self._meshes.device, pp_group=self._meshes.pp_group) / scale
        reduced = sums.reduced(self._meshes.loss_group)
        loads = self._loads.take()
        # The one sync of host and device in a step: nothing may touch the weights before loss and norm are finite.
        numbers = torch.cat([norm.to(reduced.dtype).reshape(1), reduced, loads.to(reduced.dtype)]).tolist()
        grad_norm, *totals = numbers[: 1 + len(reduced)]
        loss = totals[0] / num_valid_tokens
        can_lower_scale = self._scaler is not None and not self._scaler.is_exhausted
        is_overflow = can_lower_scale and not math.isfinite(grad_norm)
        if not math.isfinite(loss) or not (math.isfinite(grad_norm) or is_overflow):
            self._stop(step, loss, grad_norm, sums)
        if not is_overflow:
            self._update(parameters, norm, scale)
            self._loads.update_biases(loads)
        self._optimizer.zero_grad(set_to_none=True)
        if self._scaler:
            self._scaler.update(not is_overflow)
        expert_loads = self._loads.report(numbers[1 + len(reduced) :])
        return StepResult(loss, grad_norm, sums.by_source(totals), expert_loads, is_skipped=is_overflow)

    def _accumulate(self, micro_batches: Sequence[Batch], num_valid_tokens: float) -> LossSums:
        sums = LossSums(self._source_names, self._meshes.device)
        scale = self._scaler.scale if self._scaler else 1.0
        # Every position is routed, with a label or without: a ragged mask must not make balance weigh more.
        set_auxiliary_loss_factor(self._model, scale / self._num_positions)
        self._forward_backward.train(micro_batches, scale / num_valid_tokens, sums)
        sum_partial_gradients(self._model, self._meshes.fsdp_non_moe_mesh["tp"])
        return sums

    def _update(self, parameters: Sequence[nn.Parameter], norm: torch.Tensor, scale: float) -> None:
        factor: torch.Tensor | float = 1.0 / scale
        if self._max_grad_norm is not None:
            factor = clip_coefficient(norm, self._max_grad_norm) / scale
        if self._max_grad_norm is not None or scale != 1.0:
            scale_gradients(parameters, factor)
        self._optimizer.step()

    def _stop(self, step: int, loss: float, grad_norm: float, sums: LossSums) -> NoReturn:
        gradients = local_gradients(self._model.parameters())
        is_finite_here = sums.is_locally_finite() and all(bool(torch.isfinite(g).all()) for g in gradients)
        flags: list[bool] = [True] * dist.get_world_size()
        dist.all_gather_object(flags, is_finite_here)
        ranks = [rank for rank, is_finite in enumerate(flags) if not is_finite]
        raise NonFiniteError(
            f"step {step}: loss {loss}, gradient norm {grad_norm}; not finite on ranks {ranks}. The weights are as "
            "before this step. Lower the learning rate, look at the data of this step, or resume from a checkpoint"
        )
