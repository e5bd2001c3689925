"""Time the backends of ops ``permute`` and ``unpermute``, forward and backward together, over several sizes.

    python scripts/measure_permutation.py --rounds 15

The backends take turns within a round; a figure is the median over rounds. What comes out belongs into the preference
of ``torchtrain/kernels/permutation.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from torchtrain.kernels.permutation import PERMUTE, permute, unpermute

CASES = ((128, 2, 64), (512, 2, 192), (2048, 2, 192), (2048, 8, 512), (1024, 8, 2048))
"""Tokens, choices, hidden size."""


def time_once(num_tokens: int, num_choices: int, hidden_size: int, backend: str) -> float:
    """Run both ops forward and backward once; milliseconds."""
    x_ND = torch.randn(num_tokens, hidden_size, requires_grad=True)
    weights_NK = torch.rand(num_tokens, num_choices, requires_grad=True)
    slots_R = torch.randperm(num_tokens * num_choices)
    rows_R = slots_R.argsort()
    upstream = torch.ones(num_tokens, hidden_size)
    started = time.perf_counter()
    x_RD = permute(x_ND, slots_R, rows_R, num_choices, backend=backend)
    unpermute(x_RD, weights_NK, slots_R, rows_R, backend=backend).backward(upstream)
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in CASES:
        times: dict[str, list[float]] = {name: [] for name in PERMUTE.names()}
        for index in range(rounds + 1):
            for name in times if index % 2 else reversed(times):
                times[name].append(time_once(*case, name))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        figures = ", ".join(f"{name} {median:.2f} ms" for name, median in medians.items())
        sizes = "{} tokens, {} choices, hidden size {}".format(*case)
        print(f"float32 {sizes:40} {figures}, ratio {medians['one_pass'] / medians['eager']:.2f}", flush=True)


if __name__ == "__main__":
    main()
