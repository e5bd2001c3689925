import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "benchmark.py"
STUB = """
import json, pathlib, sys, time
seconds, steps, code = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder = pathlib.Path(sys.argv[-1].partition("=")[2])
folder.mkdir(parents=True)
with (folder / "metrics.jsonl").open("w") as file:
    for step in range(1, steps + 1):
        time.sleep(seconds)
        print(json.dumps({"step": step, "peak_memory_bytes": step * 2**20}), file=file, flush=True)
print("last words")
sys.exit(code)
"""


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def stub_case(benchmark, tmp_path):
    script = tmp_path / "stub.py"
    script.write_text(STUB)

    def build(label, *, seconds=0.03, steps=8, code=0):
        command = (sys.executable, str(script), str(seconds), str(steps), str(code))
        return benchmark.Case(label=label, command=command, tokens_per_step=300)

    return build


def write_job(folder):
    path = folder / "job.yaml"
    (folder / "corpus.txt").write_text("words " * 100)
    sizes = "training: {steps: 9, seq_len: 16, global_batch_size: 4}"
    path.write_text(f"{sizes}\ndataset: {{sources: [{{path: {folder}/corpus.txt}}]}}\n")
    return str(path)


def test_a_run_is_timed_by_when_its_reports_arrive(benchmark, stub_case):
    result = benchmark.measure(stub_case("a"), warmup_steps=2)
    assert result.tokens_per_second == pytest.approx(300 / 0.03, rel=0.5)
    assert result.tokens_per_second <= 300 / 0.03 * 1.1
    assert result.start_to_first_step_s >= 0.03
    assert result.peak_memory_bytes == 8 * 2**20


def test_a_pair_reports_medians_and_the_ratio(benchmark, stub_case):
    cases = [stub_case("fast", seconds=0.03), stub_case("slow", seconds=0.09)]
    summary = benchmark.summarize(cases, benchmark.measure_rounds(cases, runs=2, warmup_steps=1))
    assert summary["tokens_per_second_ratio"]["median"] > 1.5
    assert len(summary["cases"][0]["runs"]) == 2
    table = benchmark.as_markdown(summary)
    assert table.splitlines()[2].startswith("| fast |")
    assert "fast over slow" in table
    json.dumps(summary, allow_nan=False)


def test_a_failed_run_shows_its_last_words(benchmark, stub_case):
    with pytest.raises(benchmark.BenchmarkError, match=r"(?s)a ended with exit code 3.*last words"):
        benchmark.measure(stub_case("a", seconds=0, code=3), warmup_steps=1)


def test_a_run_that_is_too_short_is_refused(benchmark, stub_case):
    with pytest.raises(benchmark.BenchmarkError, match="made 2 steps"):
        benchmark.measure(stub_case("a", seconds=0, steps=2), warmup_steps=2)


def test_a_case_is_the_job_without_saving_and_the_users_word_wins(benchmark, tmp_path):
    job = write_job(tmp_path)
    case = benchmark.build_case(job, ["training.seq_len=32"], label="a", ranks=2, steps=7)
    assert case.tokens_per_step == 4 * 32
    assert "--checkpoint.save_final=false" in case.command
    assert "--training.steps=7" in case.command
    assert case.command[-1] == "--training.seq_len=32"
    assert "--nproc-per-node=2" in case.command


def test_a_wrong_job_is_refused_before_anything_runs(benchmark, tmp_path, capsys):
    assert benchmark.main([write_job(tmp_path), "--set", "training.stepz=3"]) == 2
    assert "training.stepz" in capsys.readouterr().err


def test_the_bare_baseline_refuses_a_job_whose_work_it_would_leave_out(tmp_path):
    words = ["--compile.enabled=true", "--fsdp_config.forward_prefetch_depth=2"]
    command = [sys.executable, ROOT / "scripts" / "bare_fully_shard.py", write_job(tmp_path), *words]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode != 0
    assert "set compile.enabled: False, fsdp_config.forward_prefetch_depth: 1" in refused.stderr


@pytest.mark.slow
def test_the_bare_baseline_runs(benchmark, tmp_path):
    overrides = [
        "model.overrides.hidden_size=32",
        "model.overrides.num_hidden_layers=1",
        "model.overrides.vocab_size=64",
    ]
    case = benchmark.build_case(write_job(tmp_path), overrides, label="bare", ranks=2, steps=3, is_bare=True)
    result = benchmark.measure(case, warmup_steps=1)
    assert result.tokens_per_second > 0
    assert result.peak_memory_bytes > 2**20
