"""The stages of one rank, live, and the schedule that trains them: torch's, with what it leaves open decided.

- Gradients are summed over micro-batches (``scale_grads=False``): the loss carries the one divisor already.
- What travels is declared, not found out by a trial run: shape and dtype of the residual stream at a cut are known
  from the job, and a trial run would issue collectives and count losses that belong to no step.
- FSDP: a stage is an FSDP root of its own, on the ranks of its stage only. torch's stage switches gradient reduction
  and resharding off for every backward, and after the last micro-batch reduces and reshards once, HSDP's all-reduce
  included (``perform_reduce_grad``). With ``reshard_after_forward`` off, which the family's ``parallelize`` sees to,
  parameters are gathered once a step: interleaved micro-batches would otherwise gather the same layers again for each.
  The price is memory: a stage's whole parameters, and its whole unreduced gradients, live through the step. Hence
  ``reshard_after_forward``, ``reshard_after_backward`` and ``requires_grad_sync`` have no effect here.
- A split backward computes weight gradients outside of FSDP's hooks: ``after_weight_gradients`` does what those would.

Shape legend: B = sequences of a micro-batch, T = tokens of this rank, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from torch.profiler import record_function

from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.pipeline_parallel.stage_plan import num_stages, rank_of_stage

ForwardContext = Callable[[], AbstractContextManager[Any]]
FORWARD_LABEL, BACKWARD_LABEL, STEP_LABEL = "pipeline::forward", "pipeline::backward", "pipeline::step"
"""Profiler labels around what a stage does for one micro-batch, and around the whole schedule."""


@dataclass(frozen=True)
class Boundary:
    """The residual stream of one micro-batch where it passes from a stage to the next."""

    shape_BTD: tuple[int, int, int]
    dtype: torch.dtype

    def check(self, x_BTD: Tensor) -> None:
        """Refuse to send what the receiver has no buffer for."""
        found = (tuple(x_BTD.shape), x_BTD.dtype)
        assert found == (self.shape_BTD, self.dtype), f"a stage returned {found}, and {self} was announced"


@dataclass(frozen=True)
class StageSet:
    """Where this rank's stages stand in the pipeline."""

    chunks: tuple[nn.Module, ...]
    """The callable stages, in the order of the forward pass."""
    schedule: PpSchedule
    group: dist.ProcessGroup
    """The pipeline: one rank for each ``pp_rank``."""
    device: torch.device

    @property
    def pp_size(self) -> int:
        """Ranks of the pipeline."""
        return self.group.size()

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return num_stages(self.schedule, self.pp_size)

    @property
    def indices(self) -> tuple[int, ...]:
        """Stage index of each chunk."""
        here = self.group.rank()
        return tuple(index for index in range(self.num_stages) if self.rank_of(index) == here)

    @property
    def has_first(self) -> bool:
        """Whether the embedding is here."""
        return 0 in self.indices

    @property
    def has_last(self) -> bool:
        """Whether the head is here."""
        return self.num_stages - 1 in self.indices

    def rank_of(self, stage: int) -> int:
        """Group rank that holds a stage."""
        return rank_of_stage(self.schedule, self.pp_size, stage)


class PipelineSchedule:
    """Trains this rank's stages on one global batch at a time."""

    def __init__(
        self,
        stages: StageSet,
        *,
        num_micro_batches: int,
        boundary: Boundary,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        forward_context: ForwardContext,
        after_weight_gradients: Callable[[nn.Module], None],
    ) -> None:
        """Build torch's stages and schedule.

        Args:
            stages: This rank's stages.
            num_micro_batches: Of one step.
            boundary: What travels.
            loss_fn: ``(losses_BT, rows_B)`` of one micro-batch to the scalar that backward starts from; called on the
                last stage only.
            forward_context: Opened around each forward.
            after_weight_gradients: Called with a stage whenever weight gradients of a micro-batch were computed apart.

        Collective: the pipeline.
        """
        self._stages = stages
        # NCCL wants all ranks of a group in its first call, and of the pipeline only neighbours talk to each other.
        dist.all_reduce(torch.zeros(1, device=stages.device), group=stages.group)
        live = [
            _Stage(chunk, index, stages, boundary, forward_context, after_weight_gradients)
            for chunk, index in zip(stages.chunks, stages.indices, strict=True)
        ]
        schedule_class = get_schedule_class(stages.schedule)
        self._schedule = schedule_class(
            live if issubclass(schedule_class, PipelineScheduleMulti) else live[0],
            n_microbatches=num_micro_batches,
            loss_fn=loss_fn,
            scale_grads=False,
        )

    def run(self, input_ids_BT: Tensor, arguments: Mapping[str, Tensor]) -> None:
        """Forward and backward of all micro-batches; gradients are reduced when this returns.

        Args:
            input_ids_BT: All sequences of this rank's share of the global batch.
            arguments: What each stage gets beside the residual stream, by name, first dim B.

        Collective: the pipeline and, with FSDP, the ranks of each stage.
        """
        rows_B = torch.arange(input_ids_BT.shape[0], device=input_ids_BT.device)
        with record_function(STEP_LABEL):
            self._schedule.step(
                *((input_ids_BT,) if self._stages.has_first else ()),
                target=rows_B if self._stages.has_last else None,
                return_outputs=False,
                **arguments,
            )


class _Stage(PipelineStage):
    """torch's stage with declared boundaries, a context around its forward, and labels for whoever traces."""

    def __init__(
        self,
        chunk: nn.Module,
        index: int,
        stages: StageSet,
        boundary: Boundary,
        forward_context: ForwardContext,
        after_weight_gradients: Callable[[nn.Module], None],
    ) -> None:
        self._boundary = boundary
        self._after_weight_gradients = after_weight_gradients
        self._forward_context = forward_context
        batch, tokens, _ = boundary.shape_BTD
        stream_BTD = torch.empty(boundary.shape_BTD, dtype=boundary.dtype, device="meta", requires_grad=True)
        ids_BT = torch.empty(batch, tokens, dtype=torch.int64, device="meta")
        losses_BT = torch.empty(batch, tokens, dtype=torch.float32, device="meta", requires_grad=True)
        super().__init__(
            chunk,
            index,
            stages.num_stages,
            stages.device,
            input_args=ids_BT if index == 0 else stream_BTD,
            output_args=losses_BT if index == stages.num_stages - 1 else stream_BTD,
            group=stages.group,
        )

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        with self._forward_context():
            output = super().forward_maybe_with_nosync(*args, **kwargs)
        if not self.is_last:
            self._boundary.check(output)
        return output

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{FORWARD_LABEL} {fwd_chunk_id}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with record_function(f"{BACKWARD_LABEL} {bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with record_function(f"{BACKWARD_LABEL} {bwd_chunk_id}"):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
            self._after_weight_gradients(self.submod)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        with record_function(BACKWARD_LABEL):
            super().perform_reduce_grad(grad_scale_factor)
