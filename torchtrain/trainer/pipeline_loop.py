"""A batch through a pipeline of stages; the counterpart of ``forward_backward.MicroBatchLoop``.

Every rank of a pipeline reads the same batch. Ids go to the first stage, labels to the last, positions and document
ids to all; only the residual stream and its gradient travel.

Shape legend: B = sequences, T = tokens of this rank, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.distributed.fsdp2.accumulation import reshard
from torchtrain.distributed.fsdp2.precision import DTYPES
from torchtrain.distributed.fsdp2.unreduced_gradients import add_up_in_reduce_dtype
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.pipeline_parallel.forward_pass import run_forward
from torchtrain.distributed.pipeline_parallel.schedule import Boundary, PipelineSchedule, StageSet
from torchtrain.distributed.pipeline_parallel.stage_plan import pp_micro_batch_size
from torchtrain.nn.decoder import Decoder
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.trainer.losses_by_source import LossSums
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.sequence_shard import SequenceShard


class PipelineLoop:
    """One schedule run a step, over all micro-batches of this rank's share."""

    def __init__(
        self,
        job: Job,
        chunks: Sequence[nn.Module],
        *,
        task: PretrainTask,
        meshes: Meshes,
        precision: ComputePrecision,
        shard: SequenceShard,
        vocab_size: int,
    ) -> None:
        assert meshes.pp_group is not None, "a pipeline needs pp ranks"
        self._stages = StageSet(tuple(chunks), job.accelerator.pp_schedule, meshes.pp_group, device=meshes.device)
        self._task = task
        self._precision = precision
        self._shard = shard
        self._vocab_size = vocab_size
        self._micro_batch_size = pp_micro_batch_size(job)
        self._hidden_size = _hidden_size(chunks)
        self._dtype = _stream_dtype(job, precision, has_fsdp_domain=meshes.topology.has_fsdp_domain)
        accelerator = job.accelerator
        self._tokens_divisor = accelerator.tp_size if accelerator.sequence_parallel else 1
        self._loss = _StepLoss()
        self._schedule = PipelineSchedule(
            self._stages,
            num_micro_batches=meshes.topology.backward_passes(job),
            boundary=Boundary(
                (
                    self._micro_batch_size,
                    self._stream_tokens(job.training.seq_len // accelerator.cp_size),
                    self._hidden_size,
                ),
                self._dtype,
            ),
            loss_fn=self._loss,
            forward_context=precision.forward_context,
            after_weight_gradients=add_up_in_reduce_dtype,
        )

    def train(self, micro_batches: Sequence[Batch], factor: float, sums: LossSums) -> None:
        """Run the schedule once; see ``ForwardBackward``."""
        whole = _join([self._shard.take(batch) for batch in micro_batches])
        self._loss.begin(factor)
        arguments = self._task.arguments(whole)
        self._schedule.run(arguments.pop("inputs"), arguments)
        if self._stages.has_last:
            sums.add(self._loss.losses_BT(whole.labels_BT), whole)

    def evaluate(self, batch: Batch, sums: LossSums) -> None:
        """Score one batch; see ``ForwardBackward``."""
        local = self._shard.take(batch)
        losses = self._forward(self._task.arguments(local))
        if self._stages.has_last:
            sums.add(torch.cat(losses), local)

    @torch.no_grad()
    def next_token_logits(self, ids: Sequence[int]) -> Tensor:
        """Score one prompt; see ``ForwardBackward``."""
        prompt = self._shard.pad_prompt(ids, self._stages.device)
        outputs = self._forward({"inputs": prompt.input_ids_1T, "positions_BT": prompt.positions_1T})
        source = self._stages.rank_of(self._stages.num_stages - 1)
        logits_V = torch.empty(self._vocab_size, dtype=torch.float32, device=self._stages.device)
        if outputs:
            logits_V = prompt.logits_after(outputs[0]).float()
            if self._shard.group is not None:
                dist.all_reduce(logits_V, group=self._shard.group)
        dist.broadcast(logits_V, group=self._stages.group, group_src=source)
        return logits_V

    def end_forwards(self) -> None:
        """Free full parameters; see ``ForwardBackward``."""
        for chunk in self._stages.chunks:
            reshard(chunk)

    def _forward(self, arguments: Mapping[str, Tensor]) -> list[Tensor]:
        num_sequences, num_tokens = arguments["inputs"].shape
        starts = range(0, num_sequences, self._micro_batch_size)
        return run_forward(
            self._stages,
            [{name: value[i : i + self._micro_batch_size] for name, value in arguments.items()} for i in starts],
            hidden_size=self._hidden_size,
            dtype=self._dtype,
            num_tokens=self._stream_tokens(num_tokens),
            forward_context=self._precision.forward_context,
        )

    def _stream_tokens(self, num_tokens: int) -> int:
        """Tokens of the residual stream: under sequence parallel a share of this rank's."""
        return num_tokens // self._tokens_divisor


class _StepLoss:
    """What backward starts from, and the token losses it was made of, kept until the step is over."""

    def __init__(self) -> None:
        self._factor = 0.0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin(self, factor: float) -> None:
        """Forget the step before."""
        self._factor = factor
        self._kept.clear()

    def __call__(self, losses_BT: Tensor, rows_B: Tensor) -> Tensor:
        """Sum one micro-batch's losses and multiply."""
        self._kept.append((rows_B, losses_BT.detach()))
        return losses_BT.sum() * self._factor

    def losses_BT(self, like_BT: Tensor) -> Tensor:
        """All rows, each where it was in the batch."""
        all_BT = torch.zeros(like_BT.shape, dtype=torch.float32, device=like_BT.device)
        for rows_B, losses_BT in self._kept:
            all_BT[rows_B] = losses_BT
        return all_BT


def _join(batches: Sequence[Batch]) -> Batch:
    """One batch of all sequences, in order."""
    documents = [batch.document_ids_BT for batch in batches]
    return Batch(
        input_ids_BT=torch.cat([batch.input_ids_BT for batch in batches]),
        labels_BT=torch.cat([batch.labels_BT for batch in batches]),
        positions_BT=torch.cat([batch.positions_BT for batch in batches]),
        document_ids_BT=torch.cat([ids for ids in documents if ids is not None]) if documents[0] is not None else None,
        source_ids_B=torch.cat([batch.source_ids_B for batch in batches]),
    )


def _hidden_size(chunks: Sequence[nn.Module]) -> int:
    block = cast(Decoder, chunks[0]).blocks()[0]
    return block.input_layernorm.weight.shape[0]


def _stream_dtype(job: Job, precision: ComputePrecision, *, has_fsdp_domain: bool) -> torch.dtype:
    """Dtype in which a block returns the residual stream."""
    storage = cast(torch.dtype, DTYPES[job.model.init_dtype])
    if has_fsdp_domain:
        config = job.fsdp_config.mix_precision
        return DTYPES[config.output_dtype] or DTYPES[config.param_dtype] or storage
    # Autocast computes low and adds to what the embedding returned.
    return torch.promote_types(storage, precision.autocast_dtype or storage)
