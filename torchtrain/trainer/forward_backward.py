"""How a batch goes through the model: in training, in evaluation and for a sample.

Two ways: one micro-batch after the other, here, and through a pipeline of stages, in ``pipeline_loop``. Neither knows
what a step is: dividing, clipping and updating stand in ``step``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.distributed.fsdp2.accumulation import reshard, set_micro_batch_policy
from torchtrain.distributed.meshes import Meshes
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.trainer.losses_by_source import LossSums
from torchtrain.trainer.pipeline_loop import PipelineLoop
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.run import RankModel
from torchtrain.trainer.sequence_shard import SequenceShard, plan_sequence_shard


class ForwardBackward(Protocol):
    """Runs the model on this rank's share of a batch.

    Collective: every method, the whole world, with equally many sequences on every rank.
    """

    def train(self, micro_batches: Sequence[Batch], factor: float, sums: LossSums) -> None:
        """Add the gradients of one step to ``parameter.grad``, reduced once this returns.

        Args:
            micro_batches: This rank's share of the global batch, whole sequences, on its device.
            factor: What each token loss is multiplied by before backward.
            sums: Receives the token losses, unmultiplied.
        """
        ...

    def evaluate(self, batch: Batch, sums: LossSums) -> None:
        """Add the token losses of one batch to ``sums``, without gradients."""
        ...

    def next_token_logits(self, ids: Sequence[int]) -> Tensor:
        """Compute ``logits_V`` of the token after ``ids``, on every rank."""
        ...

    def end_forwards(self) -> None:
        """Free what forwards without backward leave in memory; after the last of a row of them."""
        ...


class MicroBatchLoop:
    """One micro-batch after the other, forward then backward, through the whole model."""

    def __init__(
        self,
        model: nn.Module,
        *,
        task: PretrainTask,
        fsdp_config: FSDP2Config,
        precision: ComputePrecision,
        shard: SequenceShard,
        device: torch.device,
    ) -> None:
        self._model = model
        self._task = task
        self._fsdp_config = fsdp_config
        self._precision = precision
        self._shard = shard
        self._device = device

    def train(self, micro_batches: Sequence[Batch], factor: float, sums: LossSums) -> None:
        """Accumulate one step's gradients; see ``ForwardBackward``."""
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            set_micro_batch_policy(self._model, self._fsdp_config, is_last_micro_batch=is_last)
            local = self._shard.take(batch)
            with self._precision.forward_context():
                losses_BT = self._task.token_losses(self._model, local)
            (losses_BT.sum() * factor).backward()
            sums.add(losses_BT, local)

    @torch.no_grad()
    def evaluate(self, batch: Batch, sums: LossSums) -> None:
        """Score one batch; see ``ForwardBackward``."""
        local = self._shard.take(batch)
        with self._precision.forward_context():
            sums.add(self._task.token_losses(self._model, local), local)

    @torch.no_grad()
    def next_token_logits(self, ids: Sequence[int]) -> Tensor:
        """Score one prompt; see ``ForwardBackward``."""
        prompt = self._shard.pad_prompt(ids, self._device)
        with self._precision.forward_context():
            logits_1TV = self._model(prompt.input_ids_1T, prompt.positions_1T)
        logits_V = prompt.logits_after(logits_1TV)
        if self._shard.group is not None:
            dist.all_reduce(logits_V, group=self._shard.group)
        return logits_V

    def end_forwards(self) -> None:
        """Free full parameters; see ``ForwardBackward``."""
        reshard(self._model)


def build_forward_backward(
    job: Job,
    model: RankModel,
    *,
    task: PretrainTask,
    meshes: Meshes,
    precision: ComputePrecision,
    vocab_size: int,
) -> ForwardBackward:
    """Build the way that the job's topology asks for; ``vocab_size`` is the number of logits."""
    if meshes.pp_mesh is not None:
        shard = plan_sequence_shard(job, meshes)
        return PipelineLoop(
            job, model.chunks, task=task, meshes=meshes, precision=precision, shard=shard, vocab_size=vocab_size
        )
    return MicroBatchLoop(
        model.module,
        task=task,
        fsdp_config=job.fsdp_config,
        precision=precision,
        shard=plan_sequence_shard(job, meshes),
        device=meshes.device,
    )
