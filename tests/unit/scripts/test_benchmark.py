import csv
import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SWEEPS = sorted((ROOT / "scripts" / "sweeps").glob("*.yaml"))
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


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("benchmark")


@pytest.fixture
def benchmark_cases(benchmark):
    return importlib.import_module("benchmark_cases")


@pytest.fixture
def benchmark_report(benchmark):
    return importlib.import_module("benchmark_report")


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


def write_sweep(folder, text):
    path = folder / "sweep.yaml"
    path.write_text(f"job: {write_job(folder)}\nranks: 2\nsteps: 7\n{text}")
    return path


def test_a_run_is_timed_by_when_its_reports_arrive(benchmark, stub_case):
    result = benchmark.measure(stub_case("a"), warmup_steps=2)
    assert result.tokens_per_second == pytest.approx(300 / 0.03, rel=0.5)
    assert result.tokens_per_second <= 300 / 0.03 * 1.1
    assert result.start_to_first_step_s >= 0.03
    assert result.peak_memory_bytes == 8 * 2**20


def test_every_case_reports_medians_and_its_ratio_to_the_first(benchmark, stub_case):
    cases = [stub_case("slow", seconds=0.09), stub_case("fast", seconds=0.03), stub_case("slow too", seconds=0.09)]
    summary = benchmark.summarize(cases, benchmark.measure_rounds(cases, runs=2, warmup_steps=1))
    first, fast, slow = (case["over_first"]["tokens_per_second"] for case in summary["cases"])
    assert first == {"median": 1.0, "runs": [1.0, 1.0]}
    assert fast["median"] > 1.5 * slow["median"]
    assert [len(case["runs"]) for case in summary["cases"]] == [2, 2, 2]
    table = benchmark.as_markdown(summary)
    assert table.splitlines()[2].startswith("| slow | 1 |")
    assert "tokens/s over slow" in table.splitlines()[0]
    json.dumps(summary, allow_nan=False)


def measurements(benchmark, *rates, peak=2**20):
    return [benchmark.Measurement(rate, 1.0, peak) for rate in rates]


def test_a_ratio_is_taken_within_each_round(benchmark, stub_case):
    cases = [stub_case("a"), stub_case("b")]
    results = [measurements(benchmark, 100.0, 10.0, 1.0), measurements(benchmark, 110.0, 12.0, 1.3, peak=2**21)]
    _, b = benchmark.summarize(cases, results)["cases"]
    assert b["over_first"]["tokens_per_second"]["runs"] == pytest.approx([1.1, 1.2, 1.3])
    assert b["over_first"]["tokens_per_second"]["median"] == pytest.approx(1.2)
    assert b["over_first"]["peak_memory_bytes"]["median"] == 2
    assert "| 1.200 (1.100 to 1.300) | 2.000 (2.000 to 2.000) |" in benchmark.as_markdown(
        benchmark.summarize(cases, results)
    )


def test_an_unknown_peak_has_no_ratio(benchmark, benchmark_report, stub_case, tmp_path):
    cases = [stub_case("a"), stub_case("b")]
    results = [measurements(benchmark, 100.0, peak=0), measurements(benchmark, 110.0)]
    summary = benchmark.summarize(cases, results)
    assert benchmark.as_markdown(summary).splitlines()[-1].endswith("| 1.100 (1.100 to 1.100) | ? |")
    benchmark_report.write_csv(summary, tmp_path / "runs.csv")
    _, b = csv.DictReader((tmp_path / "runs.csv").open())
    assert b["peak_memory_bytes_over_first"] == ""


def test_each_round_starts_with_another_case_and_runs_all(benchmark):
    rounds = [benchmark.plan_round(index, 3) for index in range(3)]
    assert [order[0] for order in rounds] == [0, 1, 2]
    assert all(sorted(order) == [0, 1, 2] for order in rounds)
    assert rounds[0] == [0, 1, 2]
    assert rounds[1] == [1, 0, 2]
    assert [benchmark.plan_round(index, 2) for index in range(2)] == [[0, 1], [1, 0]]


def test_every_run_is_a_row_and_every_case_a_pair_of_bars(benchmark, benchmark_report, stub_case, tmp_path):
    cases = [stub_case("a"), stub_case("b, with a comma")]
    results = [measurements(benchmark, 100.0, 10.0), measurements(benchmark, 150.0, 12.0)]
    summary = benchmark.summarize(cases, results)
    benchmark_report.write_csv(summary, tmp_path / "runs.csv")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [(row["label"], row["round"]) for row in rows] == [
        ("a", "1"), ("a", "2"), ("b, with a comma", "1"), ("b, with a comma", "2")
    ]  # fmt: skip
    assert float(rows[2]["tokens_per_second_over_first"]) == 1.5
    benchmark_report.draw(summary, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_shows_its_last_words(benchmark, stub_case):
    with pytest.raises(benchmark.BenchmarkError, match=r"(?s)a ended with exit code 3.*last words"):
        benchmark.measure(stub_case("a", seconds=0, code=3), warmup_steps=1)


def test_a_run_that_is_too_short_is_refused(benchmark, stub_case):
    with pytest.raises(benchmark.BenchmarkError, match="made 2 steps"):
        benchmark.measure(stub_case("a", seconds=0, steps=2), warmup_steps=2)


def test_a_case_is_the_job_without_saving_and_the_users_word_wins(benchmark_cases, tmp_path):
    job = write_job(tmp_path)
    case = benchmark_cases.build_case(job, ["training.seq_len=32"], label="a", ranks=2, steps=7)
    assert case.tokens_per_step == 4 * 32
    assert "--checkpoint.save_final=false" in case.command
    assert "--training.steps=7" in case.command
    assert case.command[-1] == "--training.seq_len=32"
    assert "--nproc-per-node=2" in case.command


def test_a_sweep_gives_each_case_what_is_common_and_then_its_own(benchmark_cases, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    text = "set: [training.seq_len=32]\ncases:\n"
    text += "- {label: a}\n- {label: b, ranks: 4, set: [training.seq_len=8]}\n"
    text += f"- {{label: c, job: {write_job(other)}, baseline: bare}}\n"
    a, b, c = benchmark_cases.build_cases(benchmark_cases.read_sweep(write_sweep(tmp_path, text)))
    assert [case.tokens_per_step for case in (a, b, c)] == [4 * 32, 4 * 8, 4 * 32]
    assert [case.ranks for case in (a, b, c)] == [2, 4, 2]
    assert "--nproc-per-node=4" in b.command
    assert b.command[-2:] == ("--training.seq_len=32", "--training.seq_len=8")
    assert str(other / "job.yaml") in c.command
    assert [case.reports_on_stdout for case in (a, b, c)] == [False, False, True]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_shipped_sweep_can_run(benchmark_cases, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    sweep = benchmark_cases.read_sweep(path)
    assert len(benchmark_cases.build_cases(sweep)) == len(sweep.cases) > 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cases: [{label: a, rank: 2}]", 'cases.0.rank = 2: is not a key of a sweep; did you mean "ranks"?'),
        ("cases: [{label: a}]\nround: 2", "round = 2: is not a key of a sweep; "),
        ("cases: [{set: []}]", "cases.0.label = null: is required; add it"),
        ("cases: [{label: a, baseline: ddp}]", "cases.0.baseline = 'ddp': must be one of bare"),
        ("cases: [{label: a, ranks: two}]", "cases.0.ranks = 'two': must be a whole number"),
        ("cases: []", "cases = []: must name at least one case"),
        ("cases: [{label: a, ranks: 0}]", "cases.0.ranks = 0: must be at least 1; use 1 or more"),
        ("cases: [{label: a}]\nwarmup_steps: 7", "steps = 7: must exceed warmup_steps = 7; use 8 or more"),
        ("cases: [{label: a}, {label: a}]", "cases.1.label = 'a': must differ from the label of cases.0"),
        ("cases: [{label: a, set: [--a.b=1]}]", "cases.0.set.0 = '--a.b=1': must be KEY=VALUE"),
        ("cases: [{label: a, set: [a.b]}]", "cases.0.set.0 = 'a.b': must be KEY=VALUE"),
        ("cases: [{label: a}, {label: b, set: [training.stepz=3]}]", "b: training.stepz = 3: is not a key of the job"),
        ("cases: [{label: a}, {label: b, ranks: 3}]", "b: training.global_batch_size = 4: must be a multiple of"),
        ("set: [training.stepz=3]\ncases: [{label: a}, {label: b}]", "1. training.stepz = 3: is not a key of the job"),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(benchmark, tmp_path, capsys, text, said):
    assert benchmark.main(["--sweep", str(write_sweep(tmp_path, text))]) == 2
    assert said in capsys.readouterr().err


def test_all_that_is_wrong_with_a_sweep_is_said_at_once(benchmark, tmp_path, capsys):
    text = "runs: 0\nwarmup_steps: 0\ncases: [{label: a, ranks: 0}, {label: a}]"
    assert benchmark.main(["--sweep", str(write_sweep(tmp_path, text))]) == 2
    assert "(4 faults)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("sweep.yaml", None, "does not exist"),
        ("sweep.yaml", "", "is empty"),
        ("sweep.yaml", "cases: [", "is not valid YAML"),
        ("sweep.txt", "cases: []", "must be YAML or TOML"),
    ],
)
def test_a_sweep_file_that_cannot_be_read_is_named(benchmark, tmp_path, capsys, name, text, said):
    if text is not None:
        (tmp_path / name).write_text(text)
    assert benchmark.main(["--sweep", str(tmp_path / name)]) == 2
    assert f"sweep file = '{tmp_path / name}" in (error := capsys.readouterr().err)
    assert said in error


def test_a_case_without_a_job_is_refused(benchmark, tmp_path, capsys):
    (tmp_path / "sweep.yaml").write_text("cases: [{label: a}]")
    assert benchmark.main(["--sweep", str(tmp_path / "sweep.yaml")]) == 2
    assert "cases.0.job = null: must name a job file; name one there" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["job.yaml", "--sweep=s.yaml"], ["--sweep=s.yaml", "--baseline=bare"]])
def test_a_command_line_that_says_too_little_or_too_much_is_refused(benchmark, words):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(words)
    assert ended.value.code == 2


def test_a_wrong_job_is_refused_before_anything_runs(benchmark, tmp_path, capsys):
    assert benchmark.main([write_job(tmp_path), "--set", "training.stepz=3", "--versus-set=optimizer.lr=1"]) == 2
    assert "(1 fault):\n  1. training.stepz = 3" in capsys.readouterr().err


def test_the_bare_baseline_refuses_a_job_whose_work_it_would_leave_out(benchmark, tmp_path, capsys):
    words = ["--set=compile.enabled=true", "--set=fsdp_config.forward_prefetch_depth=2"]
    assert benchmark.main([write_job(tmp_path), "--baseline=bare", *words]) == 2
    error = capsys.readouterr().err
    assert "(2 faults)" in error
    assert "bare fully_shard: compile.enabled = true: is not done by a loop under bare fully_shard" in error
    assert "set fsdp_config.forward_prefetch_depth=1 for both sides" in error


@pytest.mark.slow
def test_a_bare_case_of_a_sweep_runs_and_leaves_every_file(benchmark, tmp_path, capsys):
    size = "model.overrides={hidden_size: 32, num_hidden_layers: 1, vocab_size: 64}"
    text = f"runs: 1\nwarmup_steps: 1\nset: ['{size}']\ncases: [{{label: bare, baseline: bare}}]"
    out = tmp_path / "out"
    files = [f"--{kind}={out / name}" for kind, name in (("json", "a.json"), ("csv", "a.csv"), ("markdown", "a.md"))]
    sweep = write_sweep(tmp_path, text)
    assert benchmark.main(["--sweep", str(sweep), "--steps=3", *files, f"--plot={out / 'a.png'}"]) == 0
    (case,) = json.loads((out / "a.json").read_text())["cases"]
    assert case["median"]["tokens_per_second"] > 0
    assert case["median"]["peak_memory_bytes"] > 2**20
    assert (out / "a.md").read_text() == capsys.readouterr().out
    assert (out / "a.csv").read_text().splitlines()[1].startswith("bare,2,1,")
    assert (out / "a.png").is_file()
