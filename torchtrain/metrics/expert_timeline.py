"""Draws how one layer's tokens travel while its experts compute, from a communication trace.

One row for each job, forward on the left and backward on the right: a lane for each exchange, in the order in which
they begin, and one for the products of the experts. Imports matplotlib, so nothing that trains may import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]

# Okabe and Ito's palette, as in ``comm_timeline``.
_TRAVELS, _WAITS, _COMPUTES = "#F0E442", "#D55E00", "#E69F00"
_PRODUCTS = "products of experts"
_PHASES = ("forward", "backward")


def find_expert_layer(records: Sequence[Record]) -> str | None:
    """Name the first unit of a step whose experts computed; None where none did, or outside of every unit."""
    return next((record["unit"] for record in records if record["record"] == "experts"), None)


def draw_expert_layer(traces: Mapping[str, Sequence[Record]], *, out: Path) -> None:
    """Draw one layer of each job, in its first micro-batch, on one scale.

    Args:
        traces: Title of each job to the records of one step of one rank, which hold a layer with experts.
        out: A PNG; its folder is made.

    Raises:
        ValueError: A job has no layer with experts.
    """
    figure, panels = plt.subplots(
        len(traces), 2, figsize=(14, 0.8 + 2.3 * len(traces)), sharex="col", squeeze=False, layout="constrained"
    )
    for row, (title, records) in zip(panels, traces.items(), strict=True):
        layer = find_expert_layer(records)
        if layer is None:
            raise ValueError(f"{title}: no unit of this step has experts")
        for axes, phase in zip(row, _PHASES, strict=True):
            _draw_pass(axes, [r for r in records if _is_of_pass(r, layer, phase)])
            axes.set_title(f"{title}, {layer}, {phase}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("milliseconds since the first exchange begins")
    colors = {"on the way": _TRAVELS, "on the way, and the rank waits": _WAITS, _PRODUCTS: _COMPUTES}
    handles = [Patch(color=color, label=words) for words, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _is_of_pass(record: Record, layer: str, phase: str) -> bool:
    is_ours = record["record"] == "experts" or "exchange" in record
    return is_ours and (record["unit"], record["phase"], record["micro_batch"]) == (layer, phase, 0)


def _draw_pass(axes: Axes, records: Sequence[Record]) -> None:
    exchanges = sorted((r for r in records if "exchange" in r), key=lambda r: r["started_s"])
    lanes = [*dict.fromkeys(r["exchange"] for r in exchanges), _PRODUCTS]
    began = min((r["started_s"] for r in records), default=0.0)
    for record in records:
        lane = lanes.index(record.get("exchange", _PRODUCTS))
        start, end = (1e3 * (record[key] - began) for key in ("started_s", "ended_s"))
        is_product = record["record"] == "experts"
        axes.barh(lane, end - start, left=start, height=0.7, color=_COMPUTES if is_product else _TRAVELS)
        if is_product:
            axes.axvspan(start, end, color=_COMPUTES, alpha=0.15, zorder=0, linewidth=0)
        elif record["waited_s"] is not None and record["waited_s"] < record["ended_s"]:
            waited = max(start, 1e3 * (record["waited_s"] - began))
            axes.barh(lane, end - waited, left=waited, height=0.25, color=_WAITS)
    axes.set_yticks(range(len(lanes)), lanes, fontsize=8)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
