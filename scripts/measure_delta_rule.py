"""Time the chunked gated delta rule against the recurrent loop, forward and backward, on a CPU.

    python scripts/measure_delta_rule.py --tokens 512 --rounds 3

The forms take turns within a round; a figure is the median over rounds. Equal results are held by
``tests/unit/kernels/test_gated_delta_rule.py``.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F

from torchtrain.kernels.gated_delta_rule import GatedDeltaRule, chunked, recurrent


def time_once(rule: GatedDeltaRule, tokens: int, heads: int, size: int, chunk_size: int) -> float:
    """Run forward and backward once; milliseconds."""
    q, k, v = (torch.randn(1, tokens, heads, size, requires_grad=True) for _ in range(3))
    log_decay = (-F.softplus(torch.randn(1, tokens, heads))).requires_grad_()
    beta = torch.rand(1, tokens, heads, requires_grad=True)
    started = time.perf_counter()
    rule(q, k, v, log_decay, beta, None, chunk_size=chunk_size).sum().backward()
    return (time.perf_counter() - started) * 1e3


def main() -> None:
    """Print one line per chunk size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=64, help="of a key and of a value")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for chunk_size in (16, 32, 64):
        times: dict[str, list[float]] = {"chunked": [], "recurrent": []}
        for _ in range(options.rounds + 1):
            for name, rule in (("chunked", chunked), ("recurrent", recurrent)):
                times[name].append(time_once(rule, options.tokens, options.heads, options.size, chunk_size))
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        figures = ", ".join(f"{name} {median:.1f} ms" for name, median in medians.items())
        print(f"chunks of {chunk_size}: {figures}, ratio {medians['recurrent'] / medians['chunked']:.1f}", flush=True)


if __name__ == "__main__":
    main()
