from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from torchtrain.config.data import SourceConfig
from torchtrain.config.training import TrainingConfig
from torchtrain.data.batch import Batch
from torchtrain.data.dataset import SequenceDataset
from torchtrain.data.loader import build_eval_loader, build_train_loader
from torchtrain.errors import DataError

STEPS = 5
GLOBAL_BATCH = 8

# Leaves with an error while workers are busy and the traceback keeps their iterator alive.
FAILING_RUN = """
import sys
from torchtrain.config.data import DatasetConfig, SourceConfig
from torchtrain.config.job import Job
from torchtrain.config.training import TrainingConfig
from torchtrain.data.dataset import build_dataset
from torchtrain.data.loader import build_train_loader
from torchtrain.data.tokenizer import BytesTokenizer

job = Job(
    dataset=DatasetConfig(sources=(SourceConfig(path=sys.argv[1]),), cache_dir=sys.argv[2]),
    training=TrainingConfig(seq_len=8, steps=1000),
)
dataset = build_dataset(job, BytesTokenizer(), vocab_size=258, show_progress=False)
batches = iter(
    build_train_loader(dataset, training=job.training, dp_rank=0, dp_size=1, start_step=0, num_workers=2)
)
next(batches)
raise RuntimeError("out of luck")
"""


@pytest.fixture
def dataset(make_dataset: Callable[..., SequenceDataset], write_jsonl: Callable[..., SourceConfig]) -> SequenceDataset:
    # Several documents to a sequence, two sources, and several epochs within the steps below.
    sources = write_jsonl("a", [f"{i:04d}" for i in range(20)]), write_jsonl("b", ["xyz" * 30], weight=0.5)
    return make_dataset(*sources, holdout_fraction=0.2)


def load(
    dataset: SequenceDataset,
    *,
    micro_batch_size: int = 1,
    dp_rank: int = 0,
    dp_size: int = 1,
    start_step: int = 0,
    num_workers: int = 0,
    global_batch_size: int = GLOBAL_BATCH,
    start_sequence: int | None = None,
) -> list[Batch]:
    training = TrainingConfig(steps=STEPS, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    loader = build_train_loader(
        dataset,
        training=training,
        dp_rank=dp_rank,
        dp_size=dp_size,
        start_step=start_step,
        start_sequence=start_sequence,
        num_workers=num_workers,
    )
    batches = list(loader)
    assert len(batches) == len(loader)
    return batches


def rows(batches: Iterable[Batch]) -> list[tuple[list[int], ...]]:
    """Every sequence as plain lists, so that equality means all of it."""
    return [
        (
            batch.input_ids_BT[i].tolist(),
            batch.labels_BT[i].tolist(),
            batch.positions_BT[i].tolist(),
            batch.document_ids_BT[i].tolist() if batch.document_ids_BT is not None else [],
            [int(batch.source_ids_B[i])],
        )
        for batch in batches
        for i in range(len(batch.input_ids_BT))
    ]


def test_a_batch_has_the_promised_shapes_and_dtypes(dataset: SequenceDataset) -> None:
    batch = load(dataset, micro_batch_size=4)[0]
    assert batch.input_ids_BT.shape == batch.labels_BT.shape == batch.positions_BT.shape == (4, 8)
    assert {batch.input_ids_BT.dtype, batch.labels_BT.dtype, batch.positions_BT.dtype} == {torch.int64}
    assert batch.document_ids_BT is not None
    assert (batch.document_ids_BT.dtype, batch.document_ids_BT.shape) == (torch.int32, (4, 8))
    assert (batch.source_ids_B.dtype, batch.source_ids_B.shape) == (torch.int64, (4,))
    assert batch.num_valid_tokens() == int((batch.labels_BT >= 0).sum()) < 32
    assert batch.to(torch.device("meta")).document_ids_BT.device.type == "meta"


def test_step_k_reads_its_own_sequences(dataset: SequenceDataset) -> None:
    read = [row[0] for row in rows(load(dataset))]
    assert read == [dataset.train_sequence(i).input_ids_T.tolist() for i in range(STEPS * GLOBAL_BATCH)]


@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_global_batch_does_not_depend_on_ranks_or_micro_batches(
    dataset: SequenceDataset, dp_size: int, micro_batch_size: int
) -> None:
    expected = rows(load(dataset))
    per_rank = [
        rows(load(dataset, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)) for rank in range(dp_size)
    ]
    share = GLOBAL_BATCH // dp_size
    together = [
        row for step in range(STEPS) for rank in range(dp_size) for row in per_rank[rank][step * share :][:share]
    ]
    assert together == expected


def test_workers_change_nothing(dataset: SequenceDataset) -> None:
    assert rows(load(dataset, micro_batch_size=2, num_workers=2)) == rows(load(dataset, micro_batch_size=2))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restart_continues_where_the_step_says(dataset: SequenceDataset, num_workers: int) -> None:
    whole = rows(load(dataset, dp_rank=1, dp_size=2))
    assert rows(load(dataset, dp_rank=1, dp_size=2, start_step=3, num_workers=num_workers)) == whole[3 * 4 :]


def test_another_batch_size_continues_at_the_sequence_after_the_last_one(dataset: SequenceDataset) -> None:
    whole, halved = rows(load(dataset)), GLOBAL_BATCH // 2
    batches = load(dataset, start_step=STEPS - 2, start_sequence=3 * GLOBAL_BATCH, global_batch_size=halved)
    assert rows(batches) == whole[3 * GLOBAL_BATCH :][: 2 * halved]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_workers_outlive_stop_signals(dataset: SequenceDataset, signal_number: signal.Signals) -> None:
    training = TrainingConfig(steps=STEPS, global_batch_size=GLOBAL_BATCH)
    loader = build_train_loader(dataset, training=training, dp_rank=0, dp_size=1, start_step=0, num_workers=2)
    others = set(multiprocessing.active_children())
    batches = iter(loader)
    read = [next(batches), next(batches)]  # both workers have come up
    workers = set(multiprocessing.active_children()) - others
    assert len(workers) == 2
    for worker in workers:
        assert worker.pid is not None
        os.kill(worker.pid, signal_number)
    assert rows([*read, *batches]) == rows(load(dataset))


def test_workers_do_not_outlive_a_failing_trainer(tmp_path: Path, write_jsonl: Callable[..., SourceConfig]) -> None:
    source = write_jsonl("a", ["some text"] * 20)
    command = [sys.executable, "-c", FAILING_RUN, source.path, str(tmp_path / "cache")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert "out of luck" in run.stderr
    assert "set_vital" not in run.stderr


@pytest.mark.parametrize("num_sequences", [1, 3, 4, 1000])
@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_every_rank_evaluates_equally_often_and_each_sequence_once(
    dataset: SequenceDataset, num_sequences: int, dp_size: int
) -> None:
    per_rank = [
        list(build_eval_loader(dataset, num_sequences=num_sequences, micro_batch_size=2, dp_rank=rank, dp_size=dp_size))
        for rank in range(dp_size)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    assert {batch.input_ids_BT.shape for batches in per_rank for batch in batches} == {(2, 8)}
    real = [row for batches in per_rank for row in rows(batches) if any(label >= 0 for label in row[1])]
    expected = [dataset.eval_sequence(i) for i in range(min(num_sequences, dataset.num_eval_sequences))]
    assert sorted(row[0] for row in real) == sorted(sequence.input_ids_T.tolist() for sequence in expected)


def test_evaluation_without_held_out_sequences_is_refused(
    make_dataset: Callable[..., SequenceDataset], write_jsonl: Callable[..., SourceConfig]
) -> None:
    dataset = make_dataset(write_jsonl("a", ["some text"] * 20))
    with pytest.raises(DataError, match=r"set dataset\.holdout_fraction above 0"):
        build_eval_loader(dataset, num_sequences=4, micro_batch_size=1, dp_rank=0, dp_size=1)
