"""What a benchmark found: medians, spreads and ratios as numbers, a table, a CSV file and a picture."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from benchmark_cases import Case

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's palette: told apart by the colour-blind too.
_BLUE, _ORANGE = "#56B4E9", "#E69F00"
_MIB = 2**20


@dataclass(frozen=True)
class Measurement:
    """One run of a case."""

    tokens_per_second: float
    start_to_first_step_s: float
    peak_memory_bytes: float


_NUMBERS = tuple(field.name for field in fields(Measurement))
_COMPARED = ("tokens_per_second", "peak_memory_bytes")

Summary = dict[str, Any]


def summarize(cases: Sequence[Case], results: Sequence[Sequence[Measurement]]) -> Summary:
    """Take medians over the runs of each case, and ratios to the first case within each round.

    Args:
        cases: What was timed.
        results: The runs of each case, one per round.

    Returns:
        JSON values. A ratio is taken where both numbers are known (not 0).
    """
    return {
        "cases": [
            {
                "label": case.label,
                "ranks": case.ranks,
                "median": {name: median(getattr(run, name) for run in runs) for name in _NUMBERS},
                "runs": [asdict(run) for run in runs],
                "over_first": {name: _ratios(runs, results[0], name) for name in _COMPARED},
            }
            for case, runs in zip(cases, results, strict=True)
        ]
    }


def _ratios(runs: Sequence[Measurement], first: Sequence[Measurement], name: str) -> dict[str, Any] | None:
    pairs = [(getattr(run, name), getattr(base, name)) for run, base in zip(runs, first, strict=True)]
    if not all(number for pair in pairs for number in pair):
        return None
    ratios = [number / base for number, base in pairs]
    return {"median": median(ratios), "runs": ratios}


def as_markdown(summary: Summary) -> str:
    """Lay a summary out as a table, each cell ``median (least to most)``."""
    cases, titles = summary["cases"], ["ranks", "tokens/s", "start to first step, s", "peak memory, MiB"]
    is_compared = len(cases) > 1
    if is_compared:
        titles += [f"{what} over {cases[0]['label']}" for what in ("tokens/s", "peak memory")]
    lines = [f"| case | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
    for case in cases:
        cells = [
            str(case["ranks"]),
            _cell(case, "tokens_per_second", 1, ",.0f"),
            _cell(case, "start_to_first_step_s", 1, ".1f"),
            _cell(case, "peak_memory_bytes", _MIB, ",.0f"),
        ]
        if is_compared:
            cells += [_ratio_cell(case["over_first"][name]) for name in _COMPARED]
        lines.append(f"| {case['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(case: Summary, name: str, unit: float, layout: str) -> str:
    return _spread(case["median"][name] / unit, [run[name] / unit for run in case["runs"]], layout)


def _ratio_cell(ratio: dict[str, Any] | None) -> str:
    return "?" if ratio is None else _spread(ratio["median"], ratio["runs"], ".3f")


def _spread(middle: float, values: Sequence[float], layout: str) -> str:
    return f"{middle:{layout}} ({min(values):{layout}} to {max(values):{layout}})"


def write_csv(summary: Summary, path: Path) -> None:
    """Write one row for each run of each case."""
    with path.open("w", newline="", encoding="utf-8") as file:
        ratio_names = [f"{name}_over_first" for name in _COMPARED]
        writer = csv.DictWriter(file, ["label", "ranks", "round", *_NUMBERS, *ratio_names])
        writer.writeheader()
        for case in summary["cases"]:
            for index, run in enumerate(case["runs"]):
                known = {name: ratio["runs"][index] for name, ratio in case["over_first"].items() if ratio is not None}
                ratios = {f"{name}_over_first": number for name, number in known.items()}
                writer.writerow({"label": case["label"], "ranks": case["ranks"], "round": index + 1} | run | ratios)


def draw(summary: Summary, path: Path) -> None:
    """Draw tokens/s and peak memory of each case as bars, with a whisker from the least run to the most."""
    cases = summary["cases"]
    is_mixed = len({case["ranks"] for case in cases}) > 1
    labels = [f"{case['label']} ({case['ranks']} ranks)" if is_mixed else case["label"] for case in cases]
    figure, panels = plt.subplots(
        1, 2, figsize=(11, 1.2 + 0.45 * len(cases)), sharey=True, layout="constrained", squeeze=True
    )
    columns = (
        ("tokens_per_second", 1, "tokens per second", _BLUE),
        ("peak_memory_bytes", _MIB, "peak memory, MiB", _ORANGE),
    )
    for axes, (name, unit, title, color) in zip(panels, columns, strict=True):
        middles = [case["median"][name] / unit for case in cases]
        runs = [[run[name] / unit for run in case["runs"]] for case in cases]
        below = [middle - min(values) for middle, values in zip(middles, runs, strict=True)]
        above = [max(values) - middle for middle, values in zip(middles, runs, strict=True)]
        bars = axes.barh(range(len(cases)), middles, xerr=(below, above), color=color, ecolor="#444444", capsize=3)
        axes.bar_label(bars, fmt="{:,.0f}", label_type="center", color="black")
        axes.set_xlabel(title)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(cases)), labels)
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=150)
    plt.close(figure)
