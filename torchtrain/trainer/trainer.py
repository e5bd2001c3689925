"""The loop: read, step, report, evaluate, save, stop.

What a step is stands in ``step``; what a run is made of, in ``assembly``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.process_group import sum_over
from torchtrain.errors import NonFiniteError, SaveError
from torchtrain.metrics.logger import MetricsLogger
from torchtrain.metrics.report import EvalReport, StepReport
from torchtrain.metrics.throughput import mfu
from torchtrain.optim.loss_scaler import LossScaler
from torchtrain.optim.schedule import lr_at, set_lr
from torchtrain.profiling import Profiler
from torchtrain.runtime.device import peak_memory_bytes
from torchtrain.runtime.garbage import GarbageSchedule
from torchtrain.runtime.logging import get_logger
from torchtrain.runtime.signals import StopSignal
from torchtrain.trainer.data_order import find_changes
from torchtrain.trainer.step import StepResult, TrainStep

logger = get_logger(__name__)


@dataclass
class Progress:
    """Where a run stands; the part of a checkpoint that is not tensors."""

    step: int = 0
    tokens_seen: int = 0
    """Valid labels."""
    sequences_seen: int = 0


@dataclass(frozen=True)
class Instruments:
    """Everything that watches a run and changes nothing in it."""

    metrics: MetricsLogger
    profiler: Profiler
    garbage: GarbageSchedule
    comm_trace: CommTrace | None
    flops_per_token: float
    peak_flops: float | None
    num_devices: int

    def tracing(self, step: int) -> AbstractContextManager[None]:
        """Record the collectives of one step, where the job asks for it."""
        return self.comm_trace.step(step) if self.comm_trace else nullcontext()

    def mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOP utilisation of the whole world; None where the device's peak is unknown."""
        return mfu(
            tokens_per_second,
            flops_per_token=self.flops_per_token,
            peak_flops=self.peak_flops,
            num_devices=self.num_devices,
        )


class Trainer:
    """Runs the steps of one job."""

    def __init__(
        self,
        job: Job,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_step: TrainStep,
        scaler: LossScaler | None,
        checkpointer: Checkpointer,
        meshes: Meshes,
        stop_signal: StopSignal,
        data_order: Mapping[str, Any],
    ) -> None:
        self._job = job
        self._model = model
        self._optimizer = optimizer
        self._train_step = train_step
        self._scaler = scaler
        self._checkpointer = checkpointer
        self._meshes = meshes
        self._stop_signal = stop_signal
        self._data_order = data_order
        self.progress = Progress()

    def resume(self) -> bool:
        """Continue from the checkpoint that the job names, if it names one and there is one.

        Returns:
            Whether there was one.

        Collective: the whole world.
        """
        state = self._checkpointer.resume(self._model, self._optimizer)
        if state is None:
            return False
        sequences_seen = state.get("sequences_seen", state["step"] * self._job.training.global_batch_size)
        self.progress = Progress(state["step"], state["tokens_seen"], sequences_seen)
        for change in find_changes(state.get("data_order", {}), self._data_order):
            logger.warning(f"the data is in another order than before the resume: {change}")
        if self._scaler and state.get("loss_scaler"):
            self._scaler.load_state_dict(state["loss_scaler"])
        logger.info(f"resumed after step {self.progress.step}, {self.progress.tokens_seen} tokens seen")
        if self.progress.step >= self._job.training.steps:
            logger.warning(
                f"NOTHING TO TRAIN: the checkpoint is of step {self.progress.step}, and training.steps = "
                f"{self._job.training.steps} counts from the run's first step; to train on, raise it, as in "
                f"--training.steps={2 * self.progress.step}"
            )
        return True

    def run(
        self,
        *,
        open_loader: Callable[[Progress], Iterable[Batch]],
        evaluate: Callable[[int], EvalReport | None] | None,
        instruments: Instruments,
    ) -> bool:
        """Train to the last step.

        Args:
            open_loader: Where the run stands to the stream of this rank's micro-batches from there on.
            evaluate: Step to a report on held-out sequences, or to None where a signal cut that short, a collective of
                the whole world; None where the job evaluates nothing.
            instruments: What watches the run.

        Returns:
            False when a signal stopped the run early, or its last evaluation; its state is saved then.

        Raises:
            NonFiniteError: A step went wrong; the save that was under way is whole.
            SaveError: The last state could not be saved. Of a save before it that failed, only the log tells.

        Collective: the whole world.
        """
        self._stop_signal.defer()
        try:
            return self._train(open_loader, evaluate, instruments)
        except NonFiniteError:
            # All ranks are here: what they were writing in the background is the state to go back to.
            self._settle_save()
            raise

    def _train(
        self,
        open_loader: Callable[[Progress], Iterable[Batch]],
        evaluate: Callable[[int], EvalReport | None] | None,
        instruments: Instruments,
    ) -> bool:
        training = self._job.training
        accumulation = self._meshes.topology.gradient_accumulation_steps(training)
        batches = iter(open_loader(self.progress))
        self._model.train()
        while self.progress.step < training.steps:
            started = time.perf_counter()
            micro_batches = self._read(batches, accumulation)
            data_wait_s = time.perf_counter() - started
            with instruments.tracing(self.progress.step + 1):
                num_valid_tokens, should_stop = self._agree(micro_batches)
                arguments = (micro_batches, num_valid_tokens, started, data_wait_s, instruments)
                report = None if should_stop else self._one_step(*arguments)
            if report is None:
                return self._leave()
            instruments.metrics.log_step(report)
            if evaluate is not None and self._is_due(self._job.task.eval_interval, also_last=True):
                evaluation = evaluate(self.progress.step)
                if evaluation is None:
                    logger.warning(f"stop signal: the evaluation after step {self.progress.step} is left out")
                    return self._leave()
                instruments.metrics.log_eval(evaluation)
            if self._is_due(self._job.checkpoint.interval, also_last=self._job.checkpoint.save_final):
                self._save(must_succeed=self.progress.step == training.steps)
            # Last, so that a trace which begins with the next step holds nothing of this one.
            instruments.garbage.collect_on(self.progress.step)
            instruments.profiler.step(self.progress.step)
        if self._job.checkpoint.save_final:
            self._checkpointer.wait()
        else:
            self._settle_save()
        return True

    def _leave(self) -> bool:
        logger.warning(f"stop signal: saving after step {self.progress.step} and leaving")
        self._save(must_succeed=True)
        self._checkpointer.wait()
        return False

    def _read(self, batches: Iterator[Batch], number: int) -> list[Batch]:
        """The micro-batches of the coming step; fewer once a signal has come, after which none is trained on."""
        micro_batches: list[Batch] = []
        while len(micro_batches) < number and self._stop_signal.received is None:
            micro_batches.append(next(batches))
        return micro_batches

    def _agree(self, micro_batches: list[Batch]) -> tuple[int, bool]:
        """Global valid labels of the coming step, and whether any rank was told to stop; one small all-reduce."""
        counts = self._meshes.counts_its_batch
        valid = float(sum(batch.num_valid_tokens() for batch in micro_batches)) if counts else 0.0
        stop = float(self._stop_signal.received is not None)
        # Over the world, not dp alone: a signal may have reached any rank.
        total, stops = sum_over([valid, stop], None, torch.device("cpu"))
        return round(total), stops > 0

    def _one_step(
        self,
        micro_batches: list[Batch],
        num_valid_tokens: int,
        started: float,
        data_wait_s: float,
        instruments: Instruments,
    ) -> StepReport:
        progress, training = self.progress, self._job.training
        lr = lr_at(progress.step, self._job.lr_scheduler, peak_lr=self._job.optimizer.lr, total_steps=training.steps)
        set_lr(self._optimizer, lr)
        progress.step += 1
        progress.sequences_seen += training.global_batch_size
        num_positions = training.global_batch_size * training.seq_len
        if num_valid_tokens == 0:
            logger.warning(f"step {progress.step} skipped: not one valid label in the global batch")
            result, num_positions = StepResult(math.nan, math.nan, {}), 0
        else:
            on_device = [batch.to(self._meshes.device) for batch in micro_batches]
            result = self._train_step.run(progress.step, on_device, num_valid_tokens)
        progress.tokens_seen += num_valid_tokens
        if result.is_skipped:
            logger.warning(f"step {progress.step}: fp16 gradients overflowed, update skipped, loss scale lowered")
        step_time_s = time.perf_counter() - started
        tokens_per_second = num_positions / step_time_s
        return StepReport(
            step=progress.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens_per_second=tokens_per_second,
            tokens_seen=progress.tokens_seen,
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            peak_memory_bytes=peak_memory_bytes(self._meshes.device),
            mfu=instruments.mfu(tokens_per_second),
            loss_by_source=result.loss_by_source,
            expert_loads=result.expert_loads,
        )

    def _is_due(self, interval: int, *, also_last: bool) -> bool:
        """Whether something that happens every ``interval`` steps happens now; 0 means never in between."""
        step = self.progress.step
        if step == self._job.training.steps:
            return also_last
        return interval > 0 and step % interval == 0

    def _save(self, *, must_succeed: bool) -> None:
        self._settle_save()
        state = {
            **asdict(self.progress),
            "data_order": dict(self._data_order),
            "loss_scaler": self._scaler.state_dict() if self._scaler else None,
        }
        try:
            self._checkpointer.save(self.progress.step, self._model, self._optimizer, state)
        except SaveError as error:
            if must_succeed:
                raise
            logger.warning(f"CHECKPOINT NOT SAVED, training goes on until the next one is due: {error}")

    def _settle_save(self) -> None:
        """Wait for the background save; what one that failed costs is itself, not the run."""
        try:
            self._checkpointer.wait()
        except SaveError as error:
            logger.warning(f"CHECKPOINT NOT SAVED in the background, training goes on: {error}")
