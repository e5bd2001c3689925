"""Batches of the right sequences at every step, for one rank.

Step ``k`` of a job with global batch ``G`` is sequences ``k * G … k * G + G - 1``; data-parallel rank ``r`` takes the
``r``-th of equal contiguous parts, in micro-batches. Nothing else decides what is read, so the position of a run is
its step: no state of a loader needs to be saved, and it resumes with other ranks or workers on the very same data.
"""

from __future__ import annotations

import atexit
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.synchronize import Event

import numpy as np
import torch
from torch import multiprocessing
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtrain.config.training import TrainingConfig
from torchtrain.data.batch import Batch
from torchtrain.data.dataset import SequenceDataset
from torchtrain.data.packing import TokenSequence
from torchtrain.errors import DataError


class MicroBatchSampler(Sampler[list[int]]):
    """The global indices of each micro-batch of one rank, step after step."""

    def __init__(
        self,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        start_sequence: int,
        num_steps: int,
    ) -> None:
        if global_batch_size % (micro_batch_size * dp_size) != 0:
            raise ValueError(f"{global_batch_size} sequences do not split into {dp_size} ranks of {micro_batch_size}")
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank_batch_size = global_batch_size // dp_size
        self._dp_rank = dp_rank
        self._start_sequence = start_sequence
        self._num_steps = num_steps

    def __len__(self) -> int:
        """Count the micro-batches."""
        return self._num_steps * (self._rank_batch_size // self._micro_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of one micro-batch after the other."""
        for step in range(self._num_steps):
            first_of_step = self._start_sequence + step * self._global_batch_size
            start = first_of_step + self._dp_rank * self._rank_batch_size
            for first in range(start, start + self._rank_batch_size, self._micro_batch_size):
                yield list(range(first, first + self._micro_batch_size))


class _TrainSequences(Dataset[TokenSequence]):
    def __init__(self, dataset: SequenceDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> TokenSequence:
        return self._dataset.train_sequence(index)


class _EvalSequences(Dataset[TokenSequence]):
    def __init__(self, dataset: SequenceDataset, num_sequences: int) -> None:
        self._dataset = dataset
        self._num_sequences = num_sequences

    def __getitem__(self, index: int) -> TokenSequence:
        return self._dataset.eval_sequence(index) if index < self._num_sequences else self._dataset.padding


def build_train_loader(
    dataset: SequenceDataset,
    *,
    training: TrainingConfig,
    dp_rank: int,
    dp_size: int,
    start_step: int,
    start_sequence: int | None = None,
    num_workers: int,
) -> StatefulDataLoader:
    """Build the loader of one rank: ``Batch`` after ``Batch``, from ``start_step`` to the end of the run.

    Args:
        dataset: The sequences of the job.
        training: Section ``training``; its sizes must divide, as the topology has checked.
        dp_rank: Which part of the global batch; ranks that differ only in TP, CP or PP read the same.
        dp_size: How many parts.
        start_step: Steps already trained, 0 for a new run.
        start_sequence: Sequences already read, where that is not ``start_step`` global batches: a run that resumes
            with another batch size goes on where it was.
        num_workers: Loader processes; 0 reads in this process.
    """
    sampler = MicroBatchSampler(
        global_batch_size=training.global_batch_size,
        micro_batch_size=training.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        start_sequence=start_step * training.global_batch_size if start_sequence is None else start_sequence,
        num_steps=max(0, training.steps - start_step),
    )
    return _build_loader(_TrainSequences(dataset), sampler, num_workers=num_workers)


def build_eval_loader(
    dataset: SequenceDataset, *, num_sequences: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> StatefulDataLoader:
    """Build the evaluation loader of one rank over the first held-out sequences, fewer where there are fewer.

    Every rank gets the same number of batches, so that no collective waits for a rank that has run out; what is missing
    is filled with sequences without a valid label. Together the ranks read each of the sequences exactly once.

    Raises:
        DataError: Nothing is held out.
    """
    if dataset.num_eval_sequences == 0:
        raise DataError("there are no held-out sequences to evaluate on; set dataset.holdout_fraction above 0")
    num_sequences = min(num_sequences, dataset.num_eval_sequences)
    round_size = micro_batch_size * dp_size
    sampler = MicroBatchSampler(
        global_batch_size=round_size,
        micro_batch_size=micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        start_sequence=0,
        num_steps=-(-num_sequences // round_size),
    )
    return _build_loader(_EvalSequences(dataset, num_sequences), sampler, num_workers=0)


def collate(sequences: Sequence[TokenSequence]) -> Batch:
    """Stack sequences into a batch."""
    documents = [s.document_ids_T for s in sequences if s.document_ids_T is not None]
    return Batch(
        input_ids_BT=torch.from_numpy(np.stack([s.input_ids_T for s in sequences])),
        labels_BT=torch.from_numpy(np.stack([s.labels_T for s in sequences])),
        positions_BT=torch.from_numpy(np.stack([s.positions_T for s in sequences])),
        document_ids_BT=torch.from_numpy(np.stack(documents)) if documents else None,
        source_ids_B=torch.tensor([s.source_id for s in sequences], dtype=torch.int64),
    )


def _build_loader(
    sequences: Dataset[TokenSequence], sampler: MicroBatchSampler, *, num_workers: int
) -> StatefulDataLoader:
    with warnings.catch_warnings():
        # torchdata 0.11 calls what torch 2.13 deprecates; a user can do nothing about it.
        warnings.filterwarnings("ignore", message=".*set_vital")
        return StatefulDataLoader(
            sequences,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=collate,
            worker_init_fn=_outlive_stop_signals() if num_workers > 0 else None,
        )


def _outlive_stop_signals() -> Callable[[int], None]:
    """Make an init function for workers which a stop signal to the whole job does not end.

    The trainer needs them until its last checkpoint is written. But Python, leaving, sends SIGTERM to child processes
    that are still there and then waits for them: from that moment on they obey.
    """
    is_leaving = multiprocessing.Event()
    # Exit functions run last in, first out: before the one that multiprocessing registered when it was imported.
    atexit.register(is_leaving.set)
    return partial(_install_worker_handlers, is_leaving)


def _install_worker_handlers(is_leaving: Event, _worker_id: int) -> None:
    def leave_if_asked(_signal_number: int, _frame: object) -> None:
        if is_leaving.is_set():
            os._exit(0)

    signal.signal(signal.SIGTERM, leave_if_asked)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
