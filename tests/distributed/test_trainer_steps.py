"""Steps that a healthy run hardly ever takes, on one real rank or two."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL, VOCAB_SIZE, build_train_step, make_global_batch
from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.config.job import Job
from torchtrain.config.load import load_job
from torchtrain.data.batch import Batch
from torchtrain.data.tokenizer import BytesTokenizer
from torchtrain.distributed.meshes import Meshes, build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.errors import NonFiniteError
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.metrics.jsonl import read_jsonl
from torchtrain.metrics.logger import MetricsLogger
from torchtrain.metrics.report import EvalReport
from torchtrain.nn.kernel_plan import KernelPlan
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.loss_scaler import LossScaler
from torchtrain.profiling import Profiler
from torchtrain.runtime.garbage import GarbageSchedule
from torchtrain.runtime.logging import setup_logging
from torchtrain.runtime.signals import StopSignal
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.evaluation import evaluate
from torchtrain.trainer.forward_backward import ForwardBackward, build_forward_backward
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.run import RankModel, Run, build_model
from torchtrain.trainer.sampling import sample
from torchtrain.trainer.step import TrainStep
from torchtrain.trainer.stopping import is_any_rank_told_to_stop
from torchtrain.trainer.trainer import Instruments, Trainer


def build_step(job: Job, scaler: LossScaler | None) -> tuple[nn.Module, torch.optim.Optimizer, TrainStep, Meshes]:
    """Build what one step needs, as the trainer does."""
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), torch.device("cpu"))
    rank_model = build_model(Run(job, load_spec(job.model.name), architecture, meshes, is_main=False))
    model = rank_model.module
    optimizer = build_optimizer(model, job.optimizer, device=meshes.device)
    step = build_train_step(job, rank_model, optimizer, meshes, scaler)
    return model, optimizer, step, meshes


def make_micro_batches(job: Job, step: int) -> tuple[Batch, list[Batch]]:
    whole = make_global_batch(step, job.training.global_batch_size, job.training.seq_len)
    return whole, split_batch(whole, 0, 1, job.training.micro_batch_size)


def overflow_at_scale_1() -> None:
    job = load_job(None, [*MODEL, "fsdp_config.mix_precision.param_dtype=float16"])
    model, _, step, _ = build_step(job, LossScaler(initial_scale=1.0))
    next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    whole, micro_batches = make_micro_batches(job, 0)
    with pytest.raises(NonFiniteError, match=r"step 7: .*not finite on ranks \[0\]"):
        step.run(7, micro_batches, whole.num_valid_tokens())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_overflow_with_no_scale_left_names_the_step_and_the_ranks() -> None:
    run_ranks(overflow_at_scale_1, 1)


def train_without_labels_in_the_second_step(folder: Path) -> list[dict[str, Any]]:
    job = load_job(None, list(MODEL))
    model, optimizer, step, meshes = build_step(job, None)
    batches = [batch for index in range(3) for batch in make_micro_batches(job, index)[1]]
    per_step = len(batches) // 3
    for batch in batches[per_step : 2 * per_step]:
        batch.labels_BT.fill_(IGNORE_INDEX)
    assert run_trainer(folder, job, model, optimizer, step, meshes, StopSignal(), batches)
    return read_jsonl(folder / "metrics.jsonl")


def run_trainer(
    folder: Path,
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: TrainStep,
    meshes: Meshes,
    stop_signal: StopSignal,
    batches: Iterable[Batch],
    evaluate: Callable[[int], EvalReport | None] | None = None,
) -> bool:
    trainer = Trainer(
        job,
        model=model,
        optimizer=optimizer,
        train_step=step,
        scaler=None,
        checkpointer=Checkpointer(job.checkpoint, folder / "checkpoints"),
        meshes=meshes,
        stop_signal=stop_signal,
        data_order={},
    )
    is_main = dist.get_rank() == 0
    metrics = MetricsLogger(job.metrics, folder, total_steps=job.training.steps, resolved_job="", is_main=is_main)
    trainer.resume()
    instruments = Instruments(
        metrics=metrics,
        profiler=Profiler(job.profiling, folder, meshes.device, 0),
        garbage=GarbageSchedule(0),
        comm_trace=None,
        flops_per_token=1.0,
        peak_flops=None,
        num_devices=1,
    )
    try:
        return trainer.run(open_loader=lambda _: batches, evaluate=evaluate, instruments=instruments)
    finally:
        metrics.close()


def stop_while_batches_are_read(folder: Path) -> tuple[bool, int]:
    job = load_job(None, [*MODEL, "training.global_batch_size=1000000000000"])
    model, optimizer, step, meshes = build_step(job, None)
    (whole, _), stop_signal, read = make_micro_batches(load_job(None, list(MODEL)), 0), StopSignal(), []

    def endless() -> Iterator[Batch]:
        while True:
            read.append(whole)
            if len(read) == 3:
                stop_signal.received = signal.SIGTERM
            assert len(read) < 100, "reads on after the signal"
            yield whole

    is_finished = run_trainer(folder, job, model, optimizer, step, meshes, stop_signal, endless())
    assert (folder / "checkpoints" / "step_00000000").is_dir()
    return is_finished, len(read)


def stop_one_rank_while_all_evaluate(folder: Path) -> tuple[bool, int, str | None]:
    setup_logging(dist.get_rank(), folder)
    words = [*MODEL, "training.steps=1", "task.eval_interval=1", "dataset.holdout_fraction=0.1"]
    job = load_job(None, [*words, "checkpoint.resume=auto"])
    model, optimizer, step, meshes = build_step(job, None)
    (whole, micro_batches), stop_signal, read = make_micro_batches(job, 0), StopSignal(), []

    def held_out() -> Iterator[Batch]:
        for index in range(10):
            if index == 2 and dist.get_rank() == 1:
                stop_signal.received = signal.SIGTERM
            read.append(index)
            yield whole

    forward_backward = build_loop(job, model, meshes)
    should_stop = partial(is_any_rank_told_to_stop, stop_signal)

    def evaluate_held_out(at: int) -> EvalReport | None:
        names = ("made_up",)
        return evaluate(
            at, model, forward_backward, held_out(), meshes=meshes, source_names=names, should_stop=should_stop
        )

    arguments = (folder, job, model, optimizer, step, meshes, stop_signal, micro_batches)
    is_finished = run_trainer(*arguments, evaluate_held_out)
    text = sample(
        model,
        forward_backward,
        BytesTokenizer(),
        "ab",
        add_bos=False,
        num_tokens=2,
        temperature=0.0,
        max_context=8,
        seed=0,
        device=meshes.device,
        should_stop=should_stop,
    )
    assert run_trainer(*arguments), "what is done already is no failure"
    return is_finished, len(read), text


def build_loop(job: Job, model: nn.Module, meshes: Meshes) -> ForwardBackward:
    precision = ComputePrecision(job.fsdp_config.mix_precision, meshes.device, has_fsdp_domain=True)
    rank_model = RankModel(model, (model,), KernelPlan("cpu", "float32", 64, ()))
    return build_forward_backward(
        job, rank_model, task=PretrainTask(), meshes=meshes, precision=precision, vocab_size=VOCAB_SIZE
    )


def test_a_signal_to_one_rank_ends_the_evaluation_of_all_and_no_sample_is_drawn(tmp_path: Path) -> None:
    assert run_ranks(stop_one_rank_while_all_evaluate, 2, tmp_path) == [(False, 3, None)] * 2
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
    assert read_jsonl(tmp_path / "eval.jsonl") == []
    said = (tmp_path / "logs" / "rank_0.log").read_text()
    assert "the evaluation after step 1 is left out" in said
    assert (
        "NOTHING TO TRAIN: the checkpoint is of step 1, and training.steps = 1 counts from the run's first step" in said
    )
    assert said.count("NOTHING TO TRAIN") == 1


def test_a_signal_that_comes_while_batches_are_read_stops_the_run_before_the_step(tmp_path: Path) -> None:
    assert run_ranks(stop_while_batches_are_read, 1, tmp_path) == [(False, 3)]


def test_a_step_without_a_label_leaves_its_line_too(tmp_path: Path) -> None:
    lines = run_ranks(train_without_labels_in_the_second_step, 1, tmp_path)[0]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] is None for line in lines] == [False, True, False]
    assert lines[1]["tokens_per_second"] == 0
    assert lines[1]["tokens_seen"] == lines[0]["tokens_seen"]
