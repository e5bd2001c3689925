"""Time the backends of op ``grouped_mm``, forward and backward, over shapes of small and published models.

    python scripts/measure_grouped_mm.py --rounds 7

The backends take turns within a round; a figure is the median over rounds. Rows are spread evenly, then by a skewed
draw, in which many groups stay empty. What comes out belongs into the preference
table of ``torchtrain/kernels/grouped_mm.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtrain.kernels.grouped_mm import GROUPED_MM, GroupedProblem, grouped_mm


@dataclass(frozen=True)
class Case:
    """One problem: rows in total, groups, and the sizes of a group's matrix."""

    rows: int
    groups: int
    inputs: int
    outputs: int


CASES = (
    Case(rows=512, groups=8, inputs=64, outputs=32),
    Case(rows=2048, groups=8, inputs=192, outputs=128),
    Case(rows=2048, groups=64, inputs=192, outputs=128),
    Case(rows=4096, groups=8, inputs=512, outputs=512),
    Case(rows=1024, groups=16, inputs=2048, outputs=768),
)
DTYPES = (torch.float32, torch.bfloat16)


def draw_offsets(case: Case, *, is_skewed: bool) -> Tensor:
    """Spread the rows over the groups, evenly or with a few groups that take most of them."""
    shares_E = torch.rand(case.groups) ** 8 if is_skewed else torch.ones(case.groups)
    ends_E = (shares_E.cumsum(0) / shares_E.sum() * case.rows).round()
    ends_E[-1] = case.rows
    return ends_E.to(torch.int32)


def time_once(case: Case, dtype: torch.dtype, offsets_E: Tensor, backend: str) -> float:
    """Run forward and backward once; milliseconds."""
    x = torch.randn(case.rows, case.inputs).to(dtype).requires_grad_()
    weight = torch.randn(case.groups, case.outputs, case.inputs).to(dtype).requires_grad_()
    upstream = torch.ones(case.rows, case.outputs, dtype=dtype)
    started = time.perf_counter()
    grouped_mm(x, weight, offsets_E, is_exact=True, backend=backend).backward(upstream)
    return (time.perf_counter() - started) * 1e3


def measure(case: Case, dtype: torch.dtype, offsets_E: Tensor, rounds: int) -> dict[str, float]:
    """Median milliseconds of each backend that is able."""
    problem = GroupedProblem("cpu", dtype, case.groups, (case.inputs, case.outputs))
    able = [name for name in GROUPED_MM.names() if GROUPED_MM.backend(name).is_able(problem)]
    times: dict[str, list[float]] = {name: [] for name in able}
    for index in range(rounds + 1):
        for name in able if index % 2 else reversed(able):
            times[name].append(time_once(case, dtype, offsets_E, name))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def table_rows(rounds: int) -> Iterator[str]:
    """Measure every case; one line each."""
    for dtype in DTYPES:
        for case in CASES:
            for is_skewed in (False, True):
                medians = measure(case, dtype, draw_offsets(case, is_skewed=is_skewed), rounds)
                spread = "skewed" if is_skewed else "even"
                sizes = f"{case.rows} rows, {case.groups} x {case.outputs} x {case.inputs}, {spread}"
                ratio = medians["torch_grouped_mm"] / medians["loop"]
                figures = ", ".join(f"{name} {median:.2f} ms" for name, median in medians.items())
                yield f"{str(dtype).removeprefix('torch.'):9} {sizes:38} {figures}, ratio {ratio:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for row in table_rows(rounds):
        print(row, flush=True)


if __name__ == "__main__":
    main()
