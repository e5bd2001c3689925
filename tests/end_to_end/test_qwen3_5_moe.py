"""The debug job of Qwen3.5 with experts as whole runs: the same losses on every topology that it is meant for."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.launch import losses, train_each
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR

# The job's model and data; fewer and shorter sequences, still of more than a chunk, and nothing but steps.
SHORT = (
    "training.steps=3",
    "training.seq_len=96",
    "training.global_batch_size=4",
    "lr_scheduler.warmup_steps=1",
    "task.eval_interval=0",
    "task.sample_prompt=null",
    "checkpoint.save_final=false",
    "metrics.tensorboard=false",
    "accelerator.device=cpu",
)
ON_FOUR_RANKS: dict[str, tuple[str, ...]] = {
    "ep2_edp2": ("accelerator.ep_size=2", "fsdp_config.dp_shard_size=4", "fsdp_config.edp_shard_size=2"),
    "cp2_dp2": ("accelerator.cp_size=2", "accelerator.cp_mode=ulysses", "fsdp_config.dp_shard_size=2"),
    "pp2_fsdp2": ("accelerator.pp_size=2", "fsdp_config.dp_shard_size=2"),
}


def job(folder: Path, *overrides: str) -> list[str]:
    words = (f"training.output_dir={folder / 'run'}", f"dataset.cache_dir={folder.parent / 'cache'}", *SHORT)
    return ["train_configs/qwen3_5_moe/debug.yaml", *(f"--{word}" for word in (*words, *overrides))]


def test_the_debug_job_trains_to_the_losses_of_one_rank(tmp_path: Path) -> None:
    codes, said = train_each(tmp_path, [job(tmp_path / "one")])
    assert codes == [0], said
    jobs = [job(tmp_path / name, *overrides) for name, overrides in ON_FOUR_RANKS.items()]
    codes, said = train_each(tmp_path, jobs, world_size=4)
    assert codes == [0] * 4, said
    alone = losses(tmp_path / "one")
    assert len(alone) == 3
    assert alone[-1] < alone[0]
    for name in ON_FOUR_RANKS:
        for step, (ours, theirs) in enumerate(zip(losses(tmp_path / name), alone, strict=True), start=1):
            assert relative_error(ours, theirs) <= FP32_SCALAR, f"{name}, step {step}: {ours} against {theirs}"
