"""From a checked job to a finished run: builds each part in the one order that works, then hands over to the loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtrain.checkpoint.checkpointer import Checkpointer
from torchtrain.config.dump import dump_job
from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.data.dataset import SequenceDataset, build_dataset
from torchtrain.data.loader import build_eval_loader, build_train_loader
from torchtrain.data.tokenizer import Tokenizer, build_tokenizer
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.legality import find_model_warnings
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.process_group import in_turns, process_group
from torchtrain.distributed.topology import Topology, find_topology_warnings
from torchtrain.metrics.comm_log import CommLog
from torchtrain.metrics.logger import MetricsLogger
from torchtrain.metrics.report import EvalReport
from torchtrain.metrics.wandb import require_wandb
from torchtrain.model_spec import ModelSpec
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.loss_scaler import LossScaler
from torchtrain.profiling import Profiler
from torchtrain.runtime.device import collective_backend, device_description, peak_flops, resolve_device
from torchtrain.runtime.env import LaunchEnv
from torchtrain.runtime.garbage import GarbageSchedule
from torchtrain.runtime.logging import get_logger, setup_logging
from torchtrain.runtime.seed import seed_everything, set_deterministic
from torchtrain.runtime.signals import EXIT_STOPPED_BY_SIGNAL, StopSignal
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.trainer.data_order import describe_data_order
from torchtrain.trainer.evaluation import evaluate
from torchtrain.trainer.export import HUGGING_FACE_FOLDER, export_model
from torchtrain.trainer.forward_backward import ForwardBackward, build_forward_backward
from torchtrain.trainer.kernels import dump_resolved_job
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.preflight import describe_config_differences
from torchtrain.trainer.run import CHECKPOINTS_FOLDER, RankModel, Run, build_model
from torchtrain.trainer.sampling import sample
from torchtrain.trainer.step import TrainStep
from torchtrain.trainer.stopping import ShouldStop, is_any_rank_told_to_stop
from torchtrain.trainer.trainer import Instruments, Progress, Trainer

logger = get_logger(__name__)

EXIT_FINISHED = 0
JOB_FILE = "job.yaml"


def train(job: Job, topology: Topology, spec: ModelSpec, architecture: Any, launch: LaunchEnv) -> int:
    """Train ``job`` on this rank.

    Returns:
        The exit code: 0, or 143 when a signal stopped the run and its state was saved.

    Raises:
        TorchtrainError: Anything the user can mend: data, checkpoint, a loss that is not finite.
    """
    setup_logging(launch.rank, Path(job.training.output_dir))
    device = resolve_device(job.accelerator.device, launch.local_rank)
    set_deterministic(job.training.deterministic)
    seed_everything(job.training.seed)
    backend = collective_backend(device, job.accelerator.backend)
    speaker = f"[rank {launch.rank}] " if launch.world_size > 1 else ""
    with StopSignal(speaker) as stop_signal, process_group(launch, device, backend, job.accelerator.dist_timeout_s):
        run = Run(job, spec, architecture, build_meshes(topology, device), is_main=launch.rank == 0)
        _announce(run)
        folder = run.output_dir / CHECKPOINTS_FOLDER
        checkpointer = Checkpointer(job.checkpoint, folder, timeout_s=job.accelerator.dist_timeout_s)
        will_resume = _refuse_early(run, checkpointer)
        # One tokenises and shows its progress: of all where they share a disk, else of each node.
        with in_turns(0 if run.is_main else 1 if launch.local_rank == 0 else 2, num_turns=3):
            tokenizer = build_tokenizer(job.tokenizer)
            dataset = build_dataset(job, tokenizer, vocab_size=architecture.vocab_size, show_progress=run.is_main)
        model = build_model(run, is_loaded_later=will_resume)
        if run.is_main:
            (run.output_dir / JOB_FILE).write_text(dump_resolved_job(job, model.kernels), encoding="utf-8")
        return _execute(run, stop_signal, model, checkpointer=checkpointer, tokenizer=tokenizer, dataset=dataset)


def _announce(run: Run) -> None:
    topology = run.meshes.topology
    logger.info(f"{topology.world_size} rank(s) on {device_description(run.device)}")
    if not topology.has_fsdp_domain:
        logger.info("FSDP is skipped: no other rank shares this model's data-parallel domain")
    of_model = find_model_warnings(run.architecture, run.job)
    for warning in (*find_job_warnings(run.job), *of_model, *find_topology_warnings(run.job, topology)):
        logger.warning(warning)
    for difference in describe_config_differences(run.job, run.spec, run.architecture):
        logger.warning(difference)
    if run.is_main:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        (run.output_dir / JOB_FILE).write_text(dump_job(run.job), encoding="utf-8")


def _refuse_early(run: Run, checkpointer: Checkpointer) -> bool:
    """Refuse what can be known to be wrong before minutes go into the data and the weights; more in ``preflight``.

    Returns:
        Whether a checkpoint will bring the weights.
    """
    if run.job.metrics.wandb:
        require_wandb()
    return checkpointer.check_resume()


def _execute(
    run: Run,
    stop_signal: StopSignal,
    rank_model: RankModel,
    *,
    checkpointer: Checkpointer,
    tokenizer: Tokenizer,
    dataset: SequenceDataset,
) -> int:
    job = run.job
    model = rank_model.module
    optimizer = build_optimizer(
        model,
        job.optimizer,
        device=run.device,
        trusted_targets=job.trusted_targets,
        is_stage=run.meshes.topology.pp_size > 1,
    )
    precision = ComputePrecision(
        job.fsdp_config.mix_precision, run.device, has_fsdp_domain=run.meshes.topology.has_fsdp_domain
    )
    scaler = LossScaler() if job.fsdp_config.mix_precision.param_dtype == "float16" else None
    forward_backward = build_forward_backward(
        job,
        rank_model,
        task=PretrainTask(),
        meshes=run.meshes,
        precision=precision,
        vocab_size=run.architecture.vocab_size,
    )
    train_step = TrainStep(
        job,
        model=model,
        optimizer=optimizer,
        forward_backward=forward_backward,
        meshes=run.meshes,
        scaler=scaler,
        source_names=dataset.source_names,
    )
    trainer = Trainer(
        job,
        model=model,
        optimizer=optimizer,
        train_step=train_step,
        scaler=scaler,
        checkpointer=checkpointer,
        meshes=run.meshes,
        stop_signal=stop_signal,
        data_order=describe_data_order(job, tokenizer),
    )
    should_stop = partial(is_any_rank_told_to_stop, stop_signal)
    is_resumed = trainer.resume()
    with _instruments(run, rank_model, resume_step=trainer.progress.step if is_resumed else None) as instruments:
        is_finished = trainer.run(
            open_loader=partial(_open_train_loader, run, dataset),
            evaluate=_evaluator(run, model, forward_backward, dataset, should_stop),
            instruments=instruments,
        )
        if is_finished:
            is_finished = _show_sample(run, model, forward_backward, tokenizer, instruments.metrics, should_stop)
        if is_finished and job.checkpoint.export_hf:
            is_finished = _export(run, model, optimizer, tokenizer, should_stop)
    _say_where(run)
    return EXIT_FINISHED if is_finished else EXIT_STOPPED_BY_SIGNAL


def _open_train_loader(run: Run, dataset: SequenceDataset, progress: Progress) -> Iterable[Batch]:
    return build_train_loader(
        dataset,
        training=run.job.training,
        dp_rank=run.meshes.dp_rank,
        dp_size=run.meshes.topology.dp_size,
        start_step=progress.step,
        start_sequence=progress.sequences_seen,
        num_workers=run.job.dataset.num_workers,
    )


def _evaluator(
    run: Run, model: nn.Module, forward_backward: ForwardBackward, dataset: SequenceDataset, should_stop: ShouldStop
) -> Callable[[int], EvalReport | None] | None:
    if run.job.task.eval_interval == 0:
        return None
    batches = build_eval_loader(
        dataset,
        num_sequences=run.job.task.eval_sequences,
        micro_batch_size=run.job.training.micro_batch_size,
        dp_rank=run.meshes.dp_rank,
        dp_size=run.meshes.topology.dp_size,
    )
    return lambda step: evaluate(
        step,
        model,
        forward_backward,
        batches,
        meshes=run.meshes,
        source_names=dataset.source_names,
        should_stop=should_stop,
    )


@contextmanager
def _instruments(run: Run, model: RankModel, *, resume_step: int | None) -> Generator[Instruments]:
    job = run.job
    with ExitStack() as stack:
        metrics = MetricsLogger(
            job.metrics,
            run.output_dir,
            total_steps=job.training.steps,
            resolved_job=dump_resolved_job(job, model.kernels),
            is_main=run.is_main,
            resume_step=resume_step,
        )
        stack.callback(metrics.close)
        garbage = GarbageSchedule(job.training.gc_interval)
        stack.callback(garbage.close)
        comm_trace = None
        if job.debug.comm_trace:
            log = CommLog(run.output_dir, is_main=run.is_main, resume_step=resume_step)
            stack.callback(log.close)
            comm_trace = CommTrace(model.chunks, run.meshes, log)
        rank = torch.distributed.get_rank()
        yield Instruments(
            metrics=metrics,
            profiler=stack.enter_context(Profiler(job.profiling, run.output_dir, run.device, rank)),
            garbage=garbage,
            comm_trace=comm_trace,
            flops_per_token=run.spec.flops_per_token(run.architecture, job.training.seq_len),
            peak_flops=job.metrics.peak_flops or peak_flops(run.device),
            num_devices=run.meshes.topology.world_size,
        )


def _show_sample(
    run: Run,
    model: nn.Module,
    forward_backward: ForwardBackward,
    tokenizer: Tokenizer,
    metrics: MetricsLogger,
    should_stop: ShouldStop,
) -> bool:
    """Show one, where the job asks for it; False where a signal came first."""
    task = run.job.task
    if task.sample_prompt is None:
        return True
    text = sample(
        model,
        forward_backward,
        tokenizer,
        task.sample_prompt,
        add_bos=run.job.tokenizer.add_bos,
        num_tokens=task.sample_tokens,
        temperature=task.sample_temperature,
        max_context=run.job.training.seq_len,
        seed=run.job.training.seed,
        device=run.device,
        should_stop=should_stop,
    )
    if text is None:
        logger.warning("stop signal: training is done, its sample is left out")
        return False
    metrics.log_text("sample", text)
    logger.info(f"sampled continuation:\n{text}")
    return True


def _export(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer, should_stop: ShouldStop
) -> bool:
    """Write the Hugging Face folder; False where a signal came first."""
    if should_stop():
        logger.warning("stop signal: training is done, its export is left out")
        return False
    export_model(run, model, optimizer, tokenizer)
    return True


def _say_where(run: Run) -> None:
    places = {
        "log": run.output_dir / "logs" / "rank_0.log",
        "metrics": run.output_dir / "metrics.jsonl",
        "TensorBoard": run.output_dir / "tensorboard",
        "checkpoints": run.output_dir / CHECKPOINTS_FOLDER,
    }
    if run.job.checkpoint.export_hf:
        places["Hugging Face"] = run.output_dir / HUGGING_FACE_FOLDER
    logger.info("everything is in\n" + "\n".join(f"  {name:<12} {path}" for name, path in places.items()))
