"""Draws one step of a communication trace: who gathers, computes and reduces when.

Two lanes on top add all units up, so that one sees what overlaps; below, each unit has a row of its own. Bands and the
words above them are the phases. Tokens on their way to experts have a colour of their own, and so have the experts'
products; how the exchanges of one layer overlap them is drawn by ``expert_timeline``. Imports matplotlib, so nothing
that trains may import this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]

# Okabe and Ito's palette: told apart by the colour-blind too.
_COLORS = {
    "gather": "#009E73",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#999999",
    "reduce": "#D55E00",
    "exchange": "#F0E442",
    "experts": "#E69F00",
    "other": "#CC79A7",
}
_WORDS = {
    "gather": "gather parameters",
    "forward": "compute, forward",
    "backward": "compute, backward",
    "optimizer": "update weights",
    "reduce": "reduce gradients",
    "exchange": "tokens to experts and home",
    "experts": "products of experts",
    "other": "other communication",
}
_COMPUTED = ("forward", "backward", "optimizer", "experts")
_NO_UNIT = "no unit"
_NARROWEST_LABEL = 0.035
"""Share of the picture's width that a bar needs to carry its unit's name."""
_TALLEST_INCHES = 30.0
_LEGEND_COLUMNS = 6


@dataclass(frozen=True)
class Bar:
    """Something that took time."""

    what: str
    unit: str
    started_ms: float
    ended_ms: float


def draw_timeline(records: Sequence[Record], *, title: str, out: Path) -> None:
    """Draw one step of one rank.

    Args:
        records: Its records, of all three kinds.
        title: What stands above.
        out: A PNG; its folder is made.

    Raises:
        ValueError: There is no summary among the records.
    """
    wall_ms = next((1e3 * record["wall_s"] for record in records if record["record"] == "summary"), None)
    if wall_ms is None:
        raise ValueError("these records hold no whole step: the summary is missing")
    bars = list(_bars(records, wall_ms))
    units = list(dict.fromkeys(bar.unit for bar in sorted(bars, key=lambda bar: (bar.unit != "root", bar.started_ms))))
    units = [unit for unit in units if unit != _NO_UNIT] + [unit for unit in units if unit == _NO_UNIT]
    height = min(_TALLEST_INCHES, 2.6 + 0.34 * len(units))
    figure, (sums, rows) = plt.subplots(
        2, 1, figsize=(14, height), sharex=True, height_ratios=(2, max(1.0, 0.55 * len(units))), layout="constrained"
    )
    _draw_sums(sums, bars, wall_ms)
    _draw_rows(rows, bars, units)
    for axes in (sums, rows):
        _draw_phases(axes, records, wall_ms, has_words=axes is sums)
    rows.set_xlim(0, wall_ms)
    rows.set_xlabel("milliseconds since this rank began the step")
    present = [what for what in _COLORS if any(bar.what == what for bar in bars)]
    handles = [Patch(color=_COLORS[what], label=_WORDS[what]) for what in present]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), _LEGEND_COLUMNS), frameon=False)
    figure.suptitle(title, fontsize=12)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _bars(records: Sequence[Record], wall_ms: float) -> Iterator[Bar]:
    for record in records:
        if record["record"] == "summary":
            continue
        ended_ms = wall_ms if record["ended_s"] is None else 1e3 * record["ended_s"]
        yield Bar(_what(record), record["unit"] or _NO_UNIT, 1e3 * record["started_s"], ended_ms)


def _what(record: Record) -> str:
    if record["record"] == "compute":
        return record["phase"]
    if record["record"] == "experts":
        return "experts"
    if "exchange" in record:
        return "exchange"
    if record["unit"] is None:
        return "other"
    return "gather" if record["kind"] == "all_gather" else "reduce"


def _draw_sums(axes: Axes, bars: Sequence[Bar], wall_ms: float) -> None:
    """Draw communication above, computation below."""
    for bar in bars:
        is_compute = bar.what in _COMPUTED
        lane, width = (0 if is_compute else 1), bar.ended_ms - bar.started_ms
        axes.barh(lane, width, left=bar.started_ms, height=0.8, color=_COLORS[bar.what], linewidth=0)
        if width > _NARROWEST_LABEL * wall_ms and bar.unit != _NO_UNIT and bar.what not in ("exchange", "experts"):
            middle = bar.started_ms + width / 2
            axes.text(middle, lane, bar.unit, ha="center", va="center", fontsize=7, color="white", clip_on=True)
    axes.set_yticks([1, 0], ["communication", "computation"])
    axes.set_ylim(-0.6, 1.6)


def _draw_rows(axes: Axes, bars: Sequence[Bar], units: Sequence[str]) -> None:
    """Draw a row per unit, the first one on top: computation at full height, communication half as high upon it.

    The products of experts are the lower half of the computation, so that exchanges do not hide them.
    """
    row_of = {unit: row for row, unit in enumerate(units)}
    for bar in sorted(bars, key=lambda bar: bar.what not in _COMPUTED):
        row, width = row_of[bar.unit], bar.ended_ms - bar.started_ms
        at, height = (row, 0.8) if bar.what in _COMPUTED else (row - 0.2, 0.4)
        at, height = (row + 0.2, 0.4) if bar.what == "experts" else (at, height)
        axes.barh(at, width, left=bar.started_ms, height=height, color=_COLORS[bar.what], linewidth=0)
    axes.set_yticks(range(len(units)), units, fontsize=8 if len(units) < 60 else 5)
    axes.set_ylim(len(units) - 0.4, -0.6)
    axes.grid(axis="x", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_phases(axes: Axes, records: Sequence[Record], wall_ms: float, *, has_words: bool) -> None:
    phases = list(_phases(records))
    ends = [started for started, _, _ in phases[1:]] + [wall_ms]
    for index, ((started, phase, micro_batch), end) in enumerate(zip(phases, ends, strict=True)):
        if index % 2:
            axes.axvspan(started, end, color="0.955", zorder=0, linewidth=0)
        words = phase if micro_batch is None else f"{phase} {micro_batch}"
        is_last = index == len(phases) - 1
        if has_words and (is_last or end - started > _NARROWEST_LABEL * wall_ms):
            at, alignment = (end, "right") if is_last else ((started + end) / 2, "center")
            axes.text(at, 1.62, words, ha=alignment, va="bottom", fontsize=8, color="0.3")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _phases(records: Sequence[Record]) -> Iterator[tuple[float, str, int | None]]:
    """Each phase and when it begins, in order."""
    current = None
    timed = [record for record in records if record["record"] != "summary"]
    for record in sorted(timed, key=lambda record: record["started_s"]):
        phase = (record["phase"], record["micro_batch"])
        if phase != current:
            yield (1e3 * record["started_s"] if current else 0.0, *phase)
        current = phase
