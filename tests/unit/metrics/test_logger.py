import json
import logging
import math
import subprocess
import sys
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtrain.config.observation import MetricsConfig
from torchtrain.errors import ConfigError
from torchtrain.metrics.jsonl import read_jsonl
from torchtrain.metrics.logger import MetricsLogger
from torchtrain.metrics.report import EvalReport, StepReport

REQUIRED_KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "tokens_seen",
    "step_time_s",
    "data_wait_s",
    "peak_memory_bytes",
]


def make_report(step, **changes):
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 - step / 10,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_second": 1000.0,
        "tokens_seen": 64 * step,
        "step_time_s": 0.064,
        "data_wait_s": 0.001,
        "peak_memory_bytes": 2**28,
    }
    return StepReport(**(values | changes))


def run_steps(folder, steps, *, config=None, resume_step=None, is_main=True):
    config = config or MetricsConfig(tensorboard=False, console="plain")
    metrics = MetricsLogger(
        config, folder, total_steps=10, resolved_job="model:\n  name: llama\n", is_main=is_main, resume_step=resume_step
    )
    for step in steps:
        metrics.log_step(make_report(step))
    return metrics


def test_each_step_is_one_line_with_exactly_the_promised_keys(tmp_path):
    run_steps(tmp_path, [1, 2]).close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [REQUIRED_KEYS] * 2


def test_mfu_and_loss_by_source_are_written_where_they_say_something(tmp_path):
    metrics = run_steps(tmp_path, [])
    metrics.log_step(make_report(1, mfu=0.4, loss_by_source={"a": 4.0, "b": 5.0}))
    metrics.log_step(make_report(2, loss_by_source={"a": 4.0}))
    metrics.close()
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert first["mfu"] == 0.4
    assert first["loss_by_source"] == {"a": 4.0, "b": 5.0}
    assert list(second) == REQUIRED_KEYS


def test_a_line_is_on_disk_at_once(tmp_path):
    metrics = run_steps(tmp_path, [1])
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    metrics.close()


def test_a_number_that_is_not_finite_is_null(tmp_path):
    metrics = run_steps(tmp_path, [])
    metrics.log_step(make_report(1, loss=math.nan, grad_norm=math.inf, loss_by_source={"a": math.nan, "b": 1.0}))
    metrics.close()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert record["loss"] is None
    assert record["grad_norm"] is None
    assert record["loss_by_source"] == {"a": None, "b": 1.0}


def test_evaluations_go_to_their_own_file(tmp_path):
    metrics = run_steps(tmp_path, [1])
    metrics.log_eval(EvalReport(step=1, loss=4.5, tokens=100, time_s=0.1))
    metrics.close()
    assert read_jsonl(tmp_path / "eval.jsonl") == [{"step": 1, "loss": 4.5, "tokens": 100, "time_s": 0.1}]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    metrics = run_steps(tmp_path, [1, 2, 3, 4])
    metrics.log_eval(EvalReport(step=2, loss=4.5, tokens=100, time_s=0.1))
    metrics.log_eval(EvalReport(step=4, loss=4.4, tokens=100, time_s=0.1))
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run_steps(tmp_path, [3, 4, 5], resume_step=2).close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in read_jsonl(tmp_path / "eval.jsonl")] == [2]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_new_run_in_an_old_folder_begins_anew(tmp_path):
    run_steps(tmp_path, [1, 2, 3]).close()
    run_steps(tmp_path, [1]).close()
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1]


def test_other_ranks_write_nothing(tmp_path):
    run_steps(tmp_path, [1, 2], is_main=False).close()
    assert list(tmp_path.iterdir()) == []


def test_plain_lines_come_on_the_interval_and_at_both_ends(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    config = MetricsConfig(tensorboard=False, console="plain", log_interval=4)
    run_steps(tmp_path, range(1, 11), config=config).close()
    assert [message.split("  loss")[0] for message in caplog.messages] == [
        "step  1/10",
        "step  4/10",
        "step  8/10",
        "step 10/10",
    ]
    assert "loss 4.9000" in caplog.messages[0]


def test_without_a_terminal_auto_is_plain(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run_steps(tmp_path, [1], config=MetricsConfig(tensorboard=False)).close()
    assert "loss 4.9000" in caplog.text


def test_the_live_bar_shows_the_latest_loss_and_leaves_the_lines(tmp_path, capsys, caplog):
    caplog.set_level(logging.INFO)
    run_steps(tmp_path, [1, 2], config=MetricsConfig(tensorboard=False, console="rich"), resume_step=0).close()
    out = capsys.readouterr().out
    assert "2/10" in out
    assert "loss 4.80" in out
    assert [message.split("  loss")[0] for message in caplog.messages] == ["step  1/10", "step  2/10"]


def test_tensorboard_holds_scalars_sources_and_the_job(tmp_path):
    metrics = run_steps(tmp_path, [1, 2, 3], config=MetricsConfig(console="plain"))
    metrics.log_step(make_report(4, loss_by_source={"a": 4.0, "b": 5.0}))
    metrics.log_eval(EvalReport(step=4, loss=4.5, tokens=100, time_s=0.1))
    metrics.close()
    run_steps(tmp_path, [3], config=MetricsConfig(console="plain"), resume_step=2).close()

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert events.Scalars("train/loss")[0].value == pytest.approx(4.9)
    tags = events.Tags()["scalars"]
    assert isinstance(tags, list)
    assert {f"train/{key}" for key in REQUIRED_KEYS[1:]} <= set(tags)
    assert {"loss_by_source/a", "loss_by_source/b", "eval/loss"} <= set(tags)
    assert b"name: llama" in events.Tensors("job/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_without_the_package_names_the_way_out_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for is_main in (True, False):
        with pytest.raises(ConfigError, match=r"metrics\.wandb.*pip install wandb"):
            run_steps(tmp_path, [], config=MetricsConfig(wandb=True), is_main=is_main)
    assert list(tmp_path.iterdir()) == []


def test_the_logger_without_tensorboard_does_not_pay_for_it():
    code = "import sys, torchtrain.metrics.logger; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
