"""A pipeline as whole processes: it trains, evaluates, samples, saves and resumes like one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.launch import losses, metrics, start, train
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR

EXTRAS = (
    "task.eval_interval=2",
    "task.eval_sequences=6",
    "dataset.holdout_fraction=0.2",
    "task.sample_prompt=Line",
    "task.sample_tokens=8",
    "task.sample_temperature=0",
)
V = ("accelerator.pp_size=2", "accelerator.pp_schedule=1F1B", "debug.comm_trace=true")


def evaluations(folder: Path) -> list[float]:
    text = (folder / "run" / "logs" / "rank_0.log").read_text()
    return [float(line.split("loss")[1].split()[0]) for line in text.splitlines() if "eval after" in line]


def sampled(said: str) -> str:
    return said.split("sampled continuation:\n")[1].splitlines()[0]


def test_a_pipeline_reports_what_one_rank_reports_and_resumes(tmp_path: Path) -> None:
    alone, parted = tmp_path / "alone", tmp_path / "parted"
    for folder in (alone, parted):
        folder.mkdir()
    codes, said_alone = train(alone, *EXTRAS)
    assert codes == [0]
    codes, said = train(parted, *EXTRAS, *V, world_size=2)
    assert codes == [0, 0], said
    for ours, theirs in zip(losses(parted), losses(alone), strict=True):
        assert relative_error(ours, theirs) <= FP32_SCALAR
    assert evaluations(parted) == pytest.approx(evaluations(alone), rel=1e-4)
    assert len(evaluations(parted)) == 2
    assert sampled(said) == sampled(said_alone)
    assert "pipeline of 2 stages" in said
    codes, said = train(parted, *V, "training.steps=6", "checkpoint.resume=auto", world_size=2)
    assert codes == [0, 0], said
    assert [line["step"] for line in metrics(parted)] == [1, 2, 3, 4, 5, 6]


def test_a_signal_to_one_stage_stops_both_with_their_state_saved(tmp_path: Path) -> None:
    training = start(tmp_path, *V, "training.steps=2000", world_size=2)
    training.wait_until(lambda: len(metrics(tmp_path)) >= 2)
    training.processes[1].terminate()
    assert training.wait() == [143, 143]
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_a_tied_model_is_refused_before_it_starts(tmp_path: Path) -> None:
    codes, said = train(tmp_path, "accelerator.pp_size=2", "model.overrides.tie_word_embeddings=true", world_size=2)
    assert codes == [2, 2]
    assert "embedding and head lie on different stages" in said
    assert "Traceback" not in said
