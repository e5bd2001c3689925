"""The debug job with experts, by its own entry: four ranks train to the losses of one, however tokens travel."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.end_to_end.launch import losses, metrics, train_each
from torchtrain.config.parallel import EpDispatcher
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR

JOB = "train_configs/qwen3_moe/debug_ep4.yaml"
ALONE = ("accelerator.ep_size=1", "fsdp_config.dp_shard_size=1")
TURBO = ("dist_config.name=fsdpturbo", "dist_config.ep_size=4")
PLUGINS = {
    "fsdp2": (),
    "fsdpturbo": TURBO,
    "fsdpturbo_custom": (*TURBO, "dist_config.fsdp_implementation=custom"),
}


def smaller(folder: Path, *words: str) -> list[str]:
    """The job, of which only steps and sizes are changed."""
    sizes = "hidden_size: 32, intermediate_size: 48, moe_intermediate_size: 16, num_hidden_layers: 2, head_dim: 8"
    changes = (
        f"model.overrides={{{sizes}}}",
        "training.steps=3",
        "training.seq_len=32",
        "task={eval_interval: 0, sample_prompt: null}",
        "dataset.holdout_fraction=0",
        "checkpoint.save_final=false",
        "metrics.tensorboard=false",
        f"training.output_dir={folder / 'run'}",
        *words,
    )
    return [JOB, *(f"--{change}" for change in changes)]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the job on one rank; in ``in_turns`` beside it, tokens visit the experts in turn."""
    folder = tmp_path_factory.mktemp("one_rank")
    in_turns = smaller(folder / "in_turns", *ALONE, "debug.force_balanced_routing=true", "metrics.tensorboard=true")
    codes, said = train_each(folder, [smaller(folder, *ALONE), in_turns])
    assert codes == [0], said
    return folder


def test_loads_stand_in_metrics_and_tensorboard_and_are_even_where_the_job_forces_them(one_rank: Path) -> None:
    chosen, forced = ([line["expert_loads"] for line in metrics(one_rank / name)] for name in ("", "in_turns"))
    routers = {"layers.0.mlp.router", "layers.1.mlp.router"}
    for loads in chosen + forced:
        assert loads.keys() == routers
    assert all(0.0 < load["entropy"] < 1.0 < load["max_over_mean"] for loads in chosen for load in loads.values())
    for loads in forced:
        assert all(load == {"entropy": pytest.approx(1.0), "max_over_mean": 1.0} for load in loads.values())
    events = EventAccumulator(str(one_rank / "in_turns" / "run" / "tensorboard")).Reload()
    for router in routers:
        assert [e.value for e in events.Scalars(f"experts/{router}/entropy")] == pytest.approx([1.0] * 3)
        assert [e.value for e in events.Scalars(f"experts/{router}/max_over_mean")] == [1.0] * 3
        assert events.Histograms(f"experts/{router}/shares")[-1].step == 3


@pytest.mark.parametrize("plugin", PLUGINS)
def test_four_ranks_train_to_the_losses_of_one_with_every_dispatcher(
    plugin: str, tmp_path: Path, one_rank: Path
) -> None:
    dispatchers = get_args(EpDispatcher)
    jobs = [
        smaller(tmp_path / name, *PLUGINS[plugin], f"dist_config.ep_dispatcher={name}", "training.micro_batch_size=1")
        for name in dispatchers
    ]
    codes, said = train_each(tmp_path, jobs, world_size=4)
    assert codes == [0] * 4, said
    expected = metrics(one_rank)
    assert len(expected) == 3
    for name in dispatchers:
        actual = metrics(tmp_path / name)
        for key in ("loss", "grad_norm"):
            for ours, theirs in zip(actual, expected, strict=True):
                assert relative_error(ours[key], theirs[key]) <= FP32_SCALAR, (name, key, ours["step"])
    assert losses(one_rank)[-1] < losses(one_rank)[0]
