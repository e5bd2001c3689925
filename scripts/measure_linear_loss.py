"""Time and weigh the token loss: all logits, our chunks, and torch's ``F.linear_cross_entropy``; forward and backward.

    python scripts/measure_linear_loss.py --rounds 5

Each loss runs in a process of its own, because the peak of resident memory is a process's. On one thread of the CPU;
what the peak grows by begins counting after a first step of the same loss on 64 tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.losses.cross_entropy import IGNORE_INDEX, LogitsLoss
from torchtrain.losses.linear_cross_entropy import ChunkedLoss

TokenLoss = Callable[[Tensor, nn.Linear, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One problem."""

    tokens: int
    hidden: int
    vocabulary: int
    chunk: int
    dtype: str = "float32"


CASES = (
    Case(tokens=4096, hidden=192, vocabulary=4096, chunk=512),
    Case(tokens=2048, hidden=256, vocabulary=32_000, chunk=256),
    Case(tokens=1024, hidden=1024, vocabulary=16_000, chunk=128),
    Case(tokens=512, hidden=128, vocabulary=8000, chunk=128, dtype="bfloat16"),
)
NAMES = ("all logits", "chunks", "torch's chunks")


def build_loss(name: str, chunk: int) -> TokenLoss:
    """Build one of the three, all with the signature of ours."""
    if name == "all logits":
        return LogitsLoss()
    if name == "chunks":
        return ChunkedLoss(chunk)
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)

    def torchs_loss(x_1ND: Tensor, lm_head: nn.Linear, labels_1N: Tensor) -> Tensor:
        return F.linear_cross_entropy(
            x_1ND[0], lm_head.weight, labels_1N[0], reduction="none", ignore_index=IGNORE_INDEX, options=options
        )[None]

    return torchs_loss


def measure(case: Case, name: str, rounds: int) -> tuple[float, float, str]:
    """Median milliseconds of a step, growth of the peak in MiB, and the dtype of the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    x_1ND = torch.randn(1, case.tokens, case.hidden).to(dtype).requires_grad_()
    lm_head = nn.Linear(case.hidden, case.vocabulary, bias=False).to(dtype)
    labels_1N = torch.randint(case.vocabulary, (1, case.tokens))
    loss = build_loss(name, case.chunk)
    loss(x_1ND[:, :64], lm_head, labels_1N[:, :64]).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, losses_dtype = [], None
    for _ in range(rounds):
        x_1ND.grad = lm_head.weight.grad = None
        started = time.perf_counter()
        losses = loss(x_1ND, lm_head, labels_1N)
        losses.sum().backward()
        losses_dtype = losses.dtype
        times.append((time.perf_counter() - started) * 1e3)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return statistics.median(times), grown, str(losses_dtype)


def main() -> None:
    """Print one line for each case and loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps per figure")
    rounds = parser.parse_args().rounds
    context = multiprocessing.get_context("spawn")
    for case in CASES:
        for name in NAMES:
            with context.Pool(1) as pool:
                milliseconds, grown, dtype = pool.apply(measure, (case, name, rounds))
            print(f"{case}: {name:14} {milliseconds:7.0f} ms {grown:7.0f} MiB  losses in {dtype}", flush=True)


if __name__ == "__main__":
    main()
