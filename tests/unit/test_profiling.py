import json

import pytest
import torch

from torchtrain.config.observation import ProfilingConfig
from torchtrain.profiling import Profiler
from torchtrain.runtime.device import count_accelerators, resolve_device

CPU = torch.device("cpu")


def run_steps(profiler, device, steps):
    with profiler:
        for step in steps:
            weight = torch.ones(8, 8, device=device)
            for _ in range(step):
                weight = weight @ weight
            profiler.step(step)


def traced_matmuls(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sum(event.get("name") == "aten::mm" for event in events)


def test_the_scheduled_steps_are_traced_and_no_others(tmp_path):
    profiler = Profiler(ProfilingConfig(trace_interval=4, trace_steps=2), tmp_path, CPU, 1)
    run_steps(profiler, CPU, range(1, 10))
    traces = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))
    assert traces == ["profile/step_4/rank_1.json", "profile/step_8/rank_1.json"]
    assert traced_matmuls(tmp_path / "profile/step_4/rank_1.json") == 3 + 4


def test_the_schedule_goes_by_the_step_of_the_run_after_a_resume(tmp_path):
    profiler = Profiler(ProfilingConfig(trace_interval=4), tmp_path, CPU, 0)
    run_steps(profiler, CPU, range(6, 9))
    assert [path.parent.name for path in tmp_path.rglob("*.json")] == ["step_8"]
    assert traced_matmuls(tmp_path / "profile/step_8/rank_0.json") == 8


def test_more_steps_than_the_interval_record_them_all(tmp_path):
    profiler = Profiler(ProfilingConfig(trace_interval=1, trace_steps=5), tmp_path, CPU, 0)
    run_steps(profiler, CPU, range(1, 4))
    assert {path.parent.name for path in tmp_path.rglob("*.json")} == {"step_2", "step_3"}


def test_off_writes_nothing(tmp_path):
    run_steps(Profiler(ProfilingConfig(), tmp_path, CPU, 0), CPU, range(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_memory_snapshots_are_left_out_where_the_device_has_none(tmp_path):
    run_steps(Profiler(ProfilingConfig(memory_snapshot_interval=1), tmp_path, CPU, 0), CPU, range(1, 3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.skipif(count_accelerators() == 0, reason="needs an accelerator")
def test_memory_snapshots_are_written_on_the_schedule(tmp_path):
    device = resolve_device("auto", 0)
    run_steps(Profiler(ProfilingConfig(memory_snapshot_interval=2), tmp_path, device, 0), device, range(1, 5))
    assert {path.parent.name for path in tmp_path.rglob("rank_0_memory.pickle")} == {"step_2", "step_4"}
