"""A run as its user meets it: what it leaves, how it ends, how it goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import losses, metrics, start, train
from torchtrain.checkpoint import layout

REQUIRED_KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "tokens_seen",
    "step_time_s",
    "data_wait_s",
    "peak_memory_bytes",
}


def test_a_run_leaves_metrics_its_job_and_a_checkpoint(tmp_path: Path) -> None:
    codes, said = train(tmp_path, "training.steps=12", "metrics.tensorboard=true", "task.sample_prompt=Line")
    assert codes == [0], said
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert all(line.keys() >= REQUIRED_KEYS for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    run = tmp_path / "run"
    assert list((run / "tensorboard").glob("events*"))
    assert (run / "checkpoints" / "step_00000012").is_dir()
    assert "sampled continuation" in said
    assert str(run / "metrics.jsonl") in said


def test_the_resolved_job_runs_again_to_the_same_losses(tmp_path: Path) -> None:
    train(tmp_path)
    first = losses(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text((tmp_path / "run" / "job.yaml").read_text())
    result = subprocess.run(
        [sys.executable, "-m", "torchtrain.train", str(job), f"--training.output_dir={tmp_path / 'again' / 'run'}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "again") == first


def test_a_wrong_job_is_refused_without_torch_and_with_all_its_faults(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("training: {stepz: 3, micro_batch_size: 3}\nmodel: {name: lama}\ndataset: {sources: [{path: x}]}\n")
    code = (
        "import sys; from torchtrain.train import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(job)], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stdout.strip() == "False"
    assert "Traceback" not in result.stderr
    for word in ("training.stepz", "training.steps", "micro_batch_size", "model.name", "llama"):
        assert word in result.stderr


@pytest.mark.parametrize("sharding", ["fsdp_config.dp_shard_size=4", "fsdp_config.dp_shard_size=2"])
def test_four_ranks_train_to_the_losses_of_one(tmp_path: Path, sharding: str) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    one.mkdir()
    four.mkdir()
    assert train(one)[0] == [0]
    codes, said = train(four, sharding, world_size=4)
    assert codes == [0] * 4, said
    assert "FSDP wraps 2 transformer blocks" in said
    assert losses(four) == pytest.approx(losses(one), rel=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_sigterm_saves_and_the_resumed_run_continues_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    settings = ("training.steps=40", f"fsdp_config.dp_shard_size={world_size}", "checkpoint.resume=auto")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    assert train(whole, *settings, world_size=world_size)[0] == [0] * world_size
    training = start(parts, *settings, world_size=world_size)
    training.wait_until(lambda: len(metrics(parts)) >= 3)
    pid = training.processes[-1].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert training.wait() == [143] * world_size, training.said()
    stopped_after = len(metrics(parts))
    assert stopped_after < 40
    assert (parts / "run" / "checkpoints" / f"step_{stopped_after:08d}").is_dir()
    codes, said = train(parts, *settings, world_size=world_size)
    assert codes == [0] * world_size, said
    assert f"resumed after step {stopped_after}" in said
    assert losses(parts) == losses(whole)


def test_a_checkpoint_of_one_rank_continues_on_four(tmp_path: Path) -> None:
    train(tmp_path, "training.steps=8", "checkpoint.interval=4")
    whole = losses(tmp_path)
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000004"
    codes, said = train(
        tmp_path,
        "training.steps=8",
        f"checkpoint.resume={checkpoint}",
        "fsdp_config.dp_shard_size=2",
        world_size=4,
    )
    assert codes == [0] * 4, said
    assert losses(tmp_path) == pytest.approx(whole, rel=1e-4)


def test_a_loss_that_is_not_finite_ends_with_code_3_and_names_the_step(tmp_path: Path) -> None:
    codes, said = train(
        tmp_path, "optimizer.lr=1e30", "training.max_grad_norm=null", "fsdp_config.dp_shard_size=2", world_size=2
    )
    assert codes == [3, 3], said
    assert "step 2" in said or "step 3" in said
    assert "not finite on ranks" in said
    assert "Traceback" not in said


def test_killed_in_the_middle_of_a_run_the_next_one_resumes(tmp_path: Path) -> None:
    settings = ("training.steps=60", "checkpoint.interval=1", "checkpoint.resume=auto", "checkpoint.async_save=true")
    training = start(tmp_path, *settings)
    training.wait_until(lambda: len(metrics(tmp_path)) >= 5)
    training.processes[0].kill()
    training.wait()
    codes, said = train(tmp_path, *settings)
    assert codes == [0], said
    assert "resumed after step" in said
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 61))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_finite_leaves_the_background_save_before_it_whole(tmp_path: Path, world_size: int) -> None:
    codes, said = train(
        tmp_path,
        "optimizer.lr=1e30",
        "training.max_grad_norm=null",
        "checkpoint.interval=1",
        "checkpoint.async_save=true",
        f"fsdp_config.dp_shard_size={world_size}",
        world_size=world_size,
    )
    assert codes == [3] * world_size, said
    folder = tmp_path / "run" / "checkpoints"
    last = f"step_{len(metrics(tmp_path)):08d}"
    assert sorted(path.name for path in folder.iterdir())[-1] == last
    assert layout.find_damage(folder / last) is None


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_save_that_fails_on_the_way_costs_that_checkpoint_only(tmp_path: Path, async_save: str) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    folder.write_text("in the way")
    training = start(tmp_path, "training.steps=40", "checkpoint.interval=1", f"checkpoint.async_save={async_save}")
    training.wait_until(lambda: len(metrics(tmp_path)) >= 3)
    folder.unlink()
    assert training.wait() == [0], training.said()
    assert "CHECKPOINT NOT SAVED" in training.said()
    assert layout.find_damage(folder / "step_00000040") is None


def test_a_last_save_that_fails_fails_the_run_with_a_code_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    codes, said = train(tmp_path, "fsdp_config.dp_shard_size=2", world_size=2)
    assert codes == [1, 1], said
    assert "Traceback" not in said


def test_an_output_folder_that_cannot_be_written_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    codes, said = train(tmp_path, f"training.output_dir={tmp_path / 'file' / 'run'}", world_size=2)
    assert codes == [2, 2], said
    assert "training.output_dir" in said
    assert "Traceback" not in said


def test_a_fault_of_one_rank_is_said_by_that_rank(tmp_path: Path) -> None:
    codes, said = train(tmp_path, "accelerator.device=npu", world_size=2)
    assert codes == [2, 2], said
    assert "[rank 1] error: the job is wrong" in said


@pytest.mark.parametrize("told", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone_or_silent_is_told_in_a_few_lines(tmp_path: Path, told: signal.Signals) -> None:
    training = start(tmp_path, "training.steps=100000", "accelerator.dist_timeout_s=3", world_size=2)
    training.wait_until(lambda: len(metrics(tmp_path)) >= 2)
    lost, left = training.processes[1], training.processes[0]
    assert lost.pid is not None
    os.kill(lost.pid, told)
    left.join(60)
    lost.kill()
    training.wait()
    said = training.said()
    assert left.exitcode == 1, said
    assert "[rank 0] error: another rank is gone or silent" in said
    assert "accelerator.dist_timeout_s = 3" in said
    assert "checkpoint.resume: auto" in said
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_a_resume_with_another_batch_size_reads_on_and_another_seed_is_told(tmp_path: Path) -> None:
    train(tmp_path)
    settings = ("checkpoint.resume=auto", "training.global_batch_size=4", "training.steps=6")
    codes, said = train(tmp_path, *settings, "training.seed=1")
    assert codes == [0], said
    assert "another order than before the resume: training.seed: 0 in the checkpoint, 1 now" in said
    record = json.loads((tmp_path / "run" / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert record["state"]["sequences_seen"] == 4 * 8 + 2 * 4


def test_speed_counts_positions_and_progress_counts_labels(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("|".join(["several bytes"] * 100))
    source = f"{{path: {tmp_path / 'corpus.txt'}, document_separator: '|'}}"
    codes, said = train(tmp_path, f"dataset.sources=[{source}]", "dataset.packing=false", "training.steps=2")
    assert codes == [0], said
    last = metrics(tmp_path)[-1]
    assert last["tokens_per_second"] * last["step_time_s"] == pytest.approx(8 * 32)
    assert last["tokens_seen"] == 2 * 8 * len("several bytes+")


@pytest.mark.parametrize("prompt", ["", "Line"])
def test_a_sample_begins_as_the_documents_do(tmp_path: Path, prompt: str) -> None:
    codes, said = train(
        tmp_path,
        "tokenizer.add_bos=false",
        f"task.sample_prompt='{prompt}'",
        "fsdp_config.dp_shard_size=2",
        world_size=2,
    )
    assert codes == [0, 0], said
    assert "sampled continuation" in said


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_whose_fp16_gradients_overflow_is_skipped_and_the_run_goes_on(tmp_path: Path, world_size: int) -> None:
    settings = (
        "fsdp_config.mix_precision.param_dtype=float16",
        f"fsdp_config.dp_shard_size={world_size}",
        "checkpoint.resume=auto",
    )
    assert train(tmp_path, *settings, world_size=world_size)[0] == [0] * world_size
    checkpoints = tmp_path / "run" / "checkpoints"
    raise_loss_scale(checkpoints / "step_00000004", 2.0**30)
    codes, said = train(tmp_path, *settings, "training.steps=5", world_size=world_size)
    assert codes == [0] * world_size, said
    assert "step 5: fp16 gradients overflowed, update skipped" in said
    line = metrics(tmp_path)[-1]
    assert line["step"] == 5
    assert line["grad_norm"] is None
    assert line["loss"] > 0
    record = json.loads((checkpoints / "step_00000005" / "state.json").read_text())
    assert record["state"]["loss_scaler"] == {"scale": 2.0**29, "finite_steps": 0}


def raise_loss_scale(checkpoint: Path, scale: float) -> None:
    """Rewrite what a checkpoint says of the loss scale, and seal it again."""
    state = checkpoint / layout.STATE_FILE
    record = json.loads(state.read_text())
    record["state"]["loss_scaler"]["scale"] = scale
    state.write_text(json.dumps(record))
    (checkpoint / layout.SEAL_FILE).unlink()
    layout.seal(checkpoint)


def test_compiled_blocks_under_fsdp_train_to_the_losses_of_eager_ones(tmp_path: Path) -> None:
    eager, compiled = tmp_path / "eager", tmp_path / "compiled"
    eager.mkdir()
    compiled.mkdir()
    settings = ("fsdp_config.dp_shard_size=2", "training.steps=3")
    assert train(eager, *settings, world_size=2)[0] == [0, 0]
    codes, said = train(compiled, *settings, "compile.enabled=true", "compile.backend=aot_eager", world_size=2)
    assert codes == [0, 0], said
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_float16_trains_with_a_loss_scaler(tmp_path: Path, world_size: int) -> None:
    codes, said = train(
        tmp_path,
        "fsdp_config.mix_precision.param_dtype=float16",
        f"fsdp_config.dp_shard_size={world_size}",
        "training.steps=8",
        world_size=world_size,
    )
    assert codes == [0] * world_size, said
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]
    assert ("honoured by autocast" in said) == (world_size == 1)


def test_evaluation_has_the_same_loss_on_any_number_of_ranks(tmp_path: Path) -> None:
    shown = []
    for world_size in (1, 4):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        codes, said = train(
            folder,
            "dataset.holdout_fraction=0.1",
            "task.eval_interval=2",
            "task.eval_sequences=7",
            f"fsdp_config.dp_shard_size={world_size}",
            world_size=world_size,
        )
        assert codes == [0] * world_size, said
        shown.append([line.split("loss")[1].split()[0] for line in said.splitlines() if "eval after" in line])
    assert len(shown[0]) == 2
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.options={momentun: 0.9}", "optimizer.options.momentun = 0.9: is not an argument"),
        ("optimizer.no_decay=['*.nrm']", "optimizer.no_decay = '*.nrm': must match a trainable parameter"),
        (
            "fsdp_config.replicate_params=[nrm.weight]",
            "fsdp_config.replicate_params = 'nrm.weight': must match a param",
        ),
        ("checkpoint.resume=lost/step_00000001", "lost/step_00000001"),
        ("accelerator.backend=nccl", "accelerator.backend = 'nccl': does not serve the device, cpu; use gloo, or null"),
    ],
)
def test_what_the_model_and_the_disk_refuse_is_refused_before_the_data_is_read(
    tmp_path: Path, override: str, said: str
) -> None:
    codes, printed = train(tmp_path, override)
    assert codes == [2]
    assert said in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "cache").exists()


def test_what_the_model_refuses_is_said_once_for_all_ranks(tmp_path: Path) -> None:
    codes, said = train(tmp_path, "fsdp_config.replicate_params=[nrm.weight]", world_size=2)
    assert codes == [2, 2], said
    assert said.count("must match a parameter of the model") == 1
    assert not (tmp_path / "run").exists()
