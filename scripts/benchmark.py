"""Time jobs in fresh processes: one, a pair, or the cases of a sweep, all in one go.

    python scripts/benchmark.py JOB --ranks 2                             one job
    python scripts/benchmark.py JOB --versus-set compile.enabled=true     the same job with and without a change
    python scripts/benchmark.py JOB --versus OTHER_JOB                    two jobs
    python scripts/benchmark.py JOB --baseline bare                       against a plain loop under bare fully_shard
    python scripts/benchmark.py --sweep SWEEP --plot PICTURE              any number; see benchmark_cases.py

Everything is measured from outside, by when a step's report arrives, so that whatever happens between steps counts too:

- tokens/s: positions of the global batch (ignored labels too, they cost the same) over the time between the report of
  the last warm-up step and that of the last step.
- start to first step: from the launch of the processes to the report of step 1, the imports included.
- peak memory: the largest ``peak_memory_bytes`` reported (rank 0; on a CPU the process's resident memory).

Each is the median of several rounds. In a round every case runs once; rounds start with another case each and change
direction, so that a machine that slows down slows all of them. Ratios are to the first case, taken within each round.
Saving, evaluating and sampling are switched off.

Exit codes: 0; 1 where a run failed; 2 where a job, a sweep or the command line is wrong, before anything runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmark_cases import Case, Sweep, SweepCase, build_cases, read_sweep
from benchmark_report import Measurement, as_markdown, draw, summarize, write_csv

from torchtrain.errors import TorchtrainError
from torchtrain.metrics.jsonl import read_jsonl

POLL_INTERVAL_S = 0.01
_SIZES = ("ranks", "runs", "steps", "warmup_steps")


class BenchmarkError(Exception):
    """A run failed or was too short; the message says which and why."""


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
            tail = "\n".join((stdout.read_text() + stderr.read_text()).splitlines()[-60:])
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


def plan_round(round_index: int, num_cases: int) -> list[int]:
    """Order the cases of a round: each round starts with another one, and every second one runs backwards."""
    direction = 1 if round_index % 2 == 0 else -1
    return [(round_index + direction * position) % num_cases for position in range(num_cases)]


def measure_rounds(cases: Sequence[Case], *, runs: int, warmup_steps: int) -> list[list[Measurement]]:
    """Measure every case ``runs`` times, alternating; one list per case."""
    results: list[list[Measurement]] = [[] for _ in cases]
    for round_index in range(runs):
        for index in plan_round(round_index, len(cases)):
            result = measure(cases[index], warmup_steps=warmup_steps)
            results[index].append(result)
            rate = f"{result.tokens_per_second:,.0f} tokens/s"
            print(f"round {round_index + 1}/{runs}  {cases[index].label}: {rate}", file=sys.stderr, flush=True)
    return results


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time jobs in fresh processes: one, a pair, or the cases of a sweep.")
    parser.add_argument("job", nargs="?", help="job file")
    parser.add_argument("--sweep", type=Path, metavar="FILE", help="time the cases of this file; sizes here win")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override, of every case")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--versus", metavar="JOB", help="pair with this job")
    other.add_argument("--baseline", choices=["bare"], help="pair with the same job under bare fully_shard")
    parser.add_argument(
        "--versus-set", action="append", default=[], metavar="KEY=VALUE", help="override of the second side only"
    )
    parser.add_argument("--ranks", type=int, help="processes on this node, 1 if nothing else says so")
    parser.add_argument("--runs", type=int, help="runs of each case; default 3")
    parser.add_argument("--steps", type=int, help="steps of each run; default 30")
    parser.add_argument("--warmup-steps", type=int, help="first steps left out of tokens/s, at least 1; default 5")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one row for each run here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw tokens/s and peak memory here")
    arguments = parser.parse_args(argv)
    if bool(arguments.job) == bool(arguments.sweep):
        parser.error("name a job file or a --sweep, one of the two")
    if arguments.sweep and (arguments.versus or arguments.baseline or arguments.versus_set):
        parser.error("a --sweep lists its own cases: no --versus, --versus-set or --baseline with it")
    if arguments.plot and arguments.plot.suffix != ".png":
        parser.error(f"--plot {arguments.plot}: name a file that ends in .png")
    return arguments


def _resolve_sweep(arguments: argparse.Namespace) -> Sweep:
    sweep = read_sweep(arguments.sweep) if arguments.sweep else _sweep_of_words(arguments)
    sizes = {name: size for name in _SIZES if (size := getattr(arguments, name)) is not None}
    return replace(sweep, set=(*sweep.set, *arguments.set), **sizes)


def _sweep_of_words(arguments: argparse.Namespace) -> Sweep:
    """A job alone is a sweep of one case, a pair one of two."""
    first = SweepCase(label=Path(arguments.job).stem, job=arguments.job)
    if not (arguments.versus or arguments.versus_set or arguments.baseline):
        return Sweep(cases=(first,))
    job = arguments.versus or arguments.job
    name = "bare fully_shard" if arguments.baseline else Path(job).stem
    label = " ".join([name, *arguments.versus_set])
    label = label if label != first.label else job
    second = SweepCase(label=label, job=job, set=tuple(arguments.versus_set), baseline=arguments.baseline)
    return Sweep(cases=(first, second))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = _parse(argv)
    files = [path for path in (arguments.json, arguments.csv, arguments.markdown, arguments.plot) if path]
    try:
        sweep = _resolve_sweep(arguments)
        cases = build_cases(sweep)
        for path in files:  # now rather than after an hour of measuring
            path.parent.mkdir(parents=True, exist_ok=True)
        results = measure_rounds(cases, runs=sweep.runs, warmup_steps=sweep.warmup_steps)
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except (BenchmarkError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    summary = summarize(cases, results)
    settings = {name: getattr(sweep, name) for name in _SIZES if name != "ranks"}
    table = f"{as_markdown(summary)}\n\nmedian of {sweep.runs} (least to most); {sweep.steps} steps, the first "
    table += f"{sweep.warmup_steps} as warm-up"
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(settings | summary, indent=2) + "\n", encoding="utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n", encoding="utf-8")
    if arguments.csv:
        write_csv(summary, arguments.csv)
    if arguments.plot:
        draw(summary, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
