"""Draw loss and throughput of one or several runs to a PNG.

    python scripts/plot_metrics.py outputs/run_a outputs/run_b --out curves.png

A run is its output folder, or the ``metrics.jsonl`` in it. Faint lines are single steps, strong ones a running mean;
dots are evaluations on held-out sequences, where ``eval.jsonl`` has some.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from torchtrain.metrics.jsonl import read_jsonl

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's palette: told apart by the colour-blind too.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclass(frozen=True)
class Run:
    """What one run reported."""

    name: str
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]


def read_run(path: Path) -> Run:
    """Read a run's reports.

    Raises:
        FileNotFoundError: There is no ``metrics.jsonl``, or nothing in it.
    """
    metrics_path = path if path.is_file() else path / "metrics.jsonl"
    if not metrics_path.is_file():
        raise FileNotFoundError(f"{path} is no run: it has no metrics.jsonl; name the output_dir of a run")
    steps = read_jsonl(metrics_path)
    if not steps:
        raise FileNotFoundError(f"{metrics_path} holds no step yet; wait for the run to report one")
    eval_path = metrics_path.with_name("eval.jsonl")
    evals = read_jsonl(eval_path) if eval_path.is_file() else []
    return Run(name=metrics_path.resolve().parent.name, steps=steps, evals=evals)


def column(records: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return one number of each record; ``null`` becomes a gap."""
    return np.array([np.nan if record.get(key) is None else record[key] for record in records], dtype=float)


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Average each value with its neighbours, ``window`` in all; gaps count for nothing and stay gaps where alone."""
    half = window // 2
    windows = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return np.array([np.nan if np.isnan(near).all() else np.nanmean(near) for near in windows])


def draw_curve(axes: Axes, run: Run, key: str, color: str) -> None:
    """Draw one number of one run over its steps."""
    steps, values = column(run.steps, "step"), column(run.steps, key)
    window = max(1, len(values) // 40)
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.22, linewidth=0.8)
    axes.plot(steps, running_mean(values, window), color=color, linewidth=1.8, label=run.name)


def draw_runs(runs: Sequence[Run], out: Path) -> None:
    """Draw all runs into one picture."""
    figure, (loss_axes, speed_axes) = plt.subplots(
        2, 1, figsize=(9, 6.5), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    for index, run in enumerate(runs):
        color = _COLORS[index % len(_COLORS)]
        draw_curve(loss_axes, run, "loss", color)
        if run.evals:
            steps, losses = column(run.evals, "step"), column(run.evals, "loss")
            loss_axes.plot(
                steps, losses, "o", color=color, markersize=5, markeredgecolor="white", label=f"{run.name}, eval"
            )
        draw_curve(speed_axes, run, "tokens_per_second", color)

    loss_axes.set_yscale("log")
    loss_axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)))
    loss_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    loss_axes.yaxis.set_minor_formatter("")
    loss_axes.set_ylabel("loss (token mean, log scale)")
    loss_axes.legend(frameon=False)
    speed_axes.set_ylim(bottom=0)
    speed_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    speed_axes.set_ylabel("tokens per second")
    speed_axes.set_xlabel("step")
    speed_axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (loss_axes, speed_axes):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Draw loss and throughput of one or several runs to a PNG.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="PNG", help="picture to write")
    arguments = parser.parse_args(argv)
    try:
        runs = [read_run(path) for path in arguments.runs]
    except FileNotFoundError as error:
        parser.error(str(error))
    draw_runs(runs, arguments.out)
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
