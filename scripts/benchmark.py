"""Time a job in fresh processes, alone or paired with another one.

    python scripts/benchmark.py JOB --ranks 2                             one job
    python scripts/benchmark.py JOB --versus-set compile.enabled=true     the same job with and without a change
    python scripts/benchmark.py JOB --versus OTHER_JOB                    two jobs
    python scripts/benchmark.py JOB --baseline bare                       against a plain loop under bare fully_shard

Everything is measured from outside, by when a step's report arrives, so that whatever happens between steps counts too:

- tokens/s: positions of the global batch (ignored labels too, they cost the same) over the time between the report of
  the last warm-up step and that of the last step.
- start to first step: from the launch of the processes to the report of step 1, the imports included.
- peak memory: the largest ``peak_memory_bytes`` reported (rank 0; on a CPU the process's resident memory).

Each is the median of several runs. Pairs alternate, and the one that goes first changes each round, so that a machine
that slows down slows both; the ratio is the median over rounds. Saving, evaluating and sampling are switched off.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from torchtrain.config.load import load_job
from torchtrain.errors import TorchtrainError
from torchtrain.metrics.jsonl import read_jsonl

POLL_INTERVAL_S = 0.01
_BARE_SCRIPT = Path(__file__).with_name("bare_fully_shard.py")
_QUIET = ("--checkpoint.interval=0", "--checkpoint.save_final=false", "--checkpoint.resume=null")
_QUIET += ("--task.eval_interval=0", "--task.sample_prompt=null", "--metrics.console=plain")


@dataclass(frozen=True)
class Case:
    """Something to time."""

    label: str
    command: tuple[str, ...]
    """Takes ``--training.output_dir=FOLDER`` as a last word."""
    tokens_per_step: int
    reports_on_stdout: bool = False
    """Its step reports are lines on stdout; others write ``FOLDER/metrics.jsonl``."""


@dataclass(frozen=True)
class Measurement:
    """One run of a case."""

    tokens_per_second: float
    start_to_first_step_s: float
    peak_memory_bytes: float


class BenchmarkError(Exception):
    """A run failed or was too short; the message says which and why."""


def build_case(
    job_path: str, overrides: Sequence[str], *, label: str, ranks: int, steps: int, is_bare: bool = False
) -> Case:
    """Turn a job into a command.

    Raises:
        ConfigError: The job is wrong.
    """
    words = [*_QUIET, f"--training.steps={steps}", *(f"--{override}" for override in overrides)]
    training = load_job(job_path, words).training
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    program = (str(_BARE_SCRIPT),) if is_bare else ("-m", "torchtrain.train")
    return Case(
        label=label,
        command=(*launcher, *program, job_path, *words),
        tokens_per_step=training.global_batch_size * training.seq_len,
        reports_on_stdout=is_bare,
    )


def measure(case: Case, *, warmup_steps: int) -> Measurement:
    """Run a case once, in fresh processes and an empty folder.

    Raises:
        BenchmarkError: It failed, or reported no step after the warm-up.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output_dir, stdout, stderr = (Path(scratch) / name for name in ("run", "stdout", "stderr"))
        report = stdout if case.reports_on_stdout else output_dir / "metrics.jsonl"
        with stdout.open("wb") as out, stderr.open("wb") as err:
            started = time.perf_counter()
            command = [*case.command, f"--training.output_dir={output_dir}"]
            with subprocess.Popen(command, stdout=out, stderr=err) as process:
                arrivals = watch(process, report)
        if process.returncode != 0:
            tail = "\n".join((stdout.read_text() + stderr.read_text()).splitlines()[-30:])
            raise BenchmarkError(f"{case.label} ended with exit code {process.returncode}:\n{tail}")
        peak = max((record["peak_memory_bytes"] for record in read_jsonl(report)), default=0)
    if len(arrivals) <= warmup_steps:
        raise BenchmarkError(f"{case.label} made {len(arrivals)} steps, which {warmup_steps} of warm-up use up")
    tokens = (len(arrivals) - warmup_steps) * case.tokens_per_step
    return Measurement(
        tokens_per_second=tokens / (arrivals[-1] - arrivals[warmup_steps - 1]),
        start_to_first_step_s=arrivals[0] - started,
        peak_memory_bytes=peak,
    )


def watch(process: subprocess.Popen[bytes], report: Path) -> list[float]:
    """Note when each step's report arrives, until the process ends."""
    arrivals: list[float] = []
    position, is_running = 0, True
    while is_running:
        is_running = process.poll() is None
        if report.is_file():
            with report.open("rb") as file:
                file.seek(position)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            position += len(whole)
            arrivals += [time.perf_counter() for line in whole.splitlines() if line.startswith(b"{")]
        if is_running:
            time.sleep(POLL_INTERVAL_S)
    return arrivals


def measure_rounds(cases: Sequence[Case], *, runs: int, warmup_steps: int) -> list[list[Measurement]]:
    """Measure every case ``runs`` times, alternating; one list per case."""
    results: list[list[Measurement]] = [[] for _ in cases]
    for round_index in range(runs):
        order = range(len(cases)) if round_index % 2 == 0 else reversed(range(len(cases)))
        for index in order:
            result = measure(cases[index], warmup_steps=warmup_steps)
            results[index].append(result)
            rate = f"{result.tokens_per_second:,.0f} tokens/s"
            print(f"round {round_index + 1}/{runs}  {cases[index].label}: {rate}", file=sys.stderr, flush=True)
    return results


def summarize(cases: Sequence[Case], results: Sequence[Sequence[Measurement]]) -> dict[str, Any]:
    """Take medians, and the ratio first over second where there are two cases."""
    names = [field.name for field in fields(Measurement)]
    summary: dict[str, Any] = {
        "cases": [
            {
                "label": case.label,
                "median": {name: median(getattr(run, name) for run in runs) for name in names},
                "runs": [asdict(run) for run in runs],
            }
            for case, runs in zip(cases, results, strict=True)
        ]
    }
    if len(cases) == 2:
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in zip(*results, strict=True)]
        summary["tokens_per_second_ratio"] = {"median": median(ratios), "runs": ratios}
    return summary


def as_markdown(summary: dict[str, Any]) -> str:
    """Lay a summary out as a table, each cell ``median (least to most)``."""
    lines = ["| case | tokens/s | start to first step, s | peak memory, MiB |", "|---|---:|---:|---:|"]
    for case in summary["cases"]:
        cells = [
            _cell(case, "tokens_per_second", 1, ",.0f"),
            _cell(case, "start_to_first_step_s", 1, ".1f"),
            _cell(case, "peak_memory_bytes", 2**20, ",.0f"),
        ]
        lines.append(f"| {case['label']} | {' | '.join(cells)} |")
    if ratio := summary.get("tokens_per_second_ratio"):
        first, second = (case["label"] for case in summary["cases"])
        spread = f"{min(ratio['runs']):.3f} to {max(ratio['runs']):.3f}"
        lines += ["", f"tokens/s, {first} over {second}: **{ratio['median']:.3f}** ({spread})"]
    return "\n".join(lines)


def _cell(case: dict[str, Any], name: str, unit: float, layout: str) -> str:
    values = [run[name] / unit for run in case["runs"]]
    return f"{case['median'][name] / unit:{layout}} ({min(values):{layout}} to {max(values):{layout}})"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time a job in fresh processes, alone or paired with another one.")
    parser.add_argument("job", help="job file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, of both sides")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--versus", metavar="JOB", help="pair with this job")
    other.add_argument("--baseline", choices=["bare"], help="pair with the same job under bare fully_shard")
    parser.add_argument(
        "--versus-set", action="append", default=[], metavar="KEY=VALUE", help="override of the second side only"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes on this node")
    parser.add_argument("--runs", type=int, default=3, help="runs of each side")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run")
    parser.add_argument("--warmup-steps", type=int, default=5, help="first steps left out of tokens/s, at least 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.warmup_steps < arguments.steps:
        parser.error("--warmup-steps must be at least 1 and below --steps")
    if arguments.runs < 1 or arguments.ranks < 1:
        parser.error("--runs and --ranks must be at least 1")
    return arguments


def _build_cases(arguments: argparse.Namespace) -> list[Case]:
    size = {"ranks": arguments.ranks, "steps": arguments.steps}
    first = build_case(arguments.job, arguments.set, label=Path(arguments.job).stem, **size)
    if not (arguments.versus or arguments.versus_set or arguments.baseline):
        return [first]
    is_bare = arguments.baseline == "bare"
    other = arguments.versus or arguments.job
    name = "bare fully_shard" if is_bare else Path(other).stem
    label = " ".join([name, *arguments.versus_set])
    second = build_case(other, [*arguments.set, *arguments.versus_set], label=label, is_bare=is_bare, **size)
    return [first, second]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parse(argv)
    try:
        cases = _build_cases(arguments)
        results = measure_rounds(cases, runs=arguments.runs, warmup_steps=arguments.warmup_steps)
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = summarize(cases, results)
    settings = {name: getattr(arguments, name) for name in ("ranks", "runs", "steps", "warmup_steps")}
    print(as_markdown(summary))
    print(f"\nmedian of {arguments.runs} (least to most); ranks {arguments.ranks}, steps {arguments.steps}")
    if arguments.json:
        arguments.json.write_text(json.dumps(settings | summary, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
