"""Starts whole training processes from a fork server that has torch loaded: a run costs a second, not ten."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")

TINY_MODEL = (
    "{vocab_size: 259, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}"
)


class Training:
    """The ranks of one run, or of several one after the other, started but not waited for."""

    def __init__(self, jobs: Sequence[list[str]], world_size: int, output: Path) -> None:
        runs = [(arguments, _free_port()) for arguments in jobs]
        self.output = output
        self.processes = [
            _context.Process(target=_train, args=(runs, rank, world_size, output), daemon=False)
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

    def wait(self, timeout_s: float = 120.0) -> list[int | None]:
        """Exit codes by rank; what is still alive after ``timeout_s`` is killed and fails the test."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for rank in hung:
            self.processes[rank].kill()
        assert not hung, f"ranks {hung} did not end in {timeout_s} s:\n{self.said()}"
        return [process.exitcode for process in self.processes]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until ``condition`` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s in vain:\n{self.said()}"
            assert any(process.is_alive() for process in self.processes), f"all ranks ended:\n{self.said()}"
            time.sleep(0.02)

    def said(self) -> str:
        """Everything all ranks printed."""
        return self.output.read_text() if self.output.exists() else ""


def train(folder: Path, *overrides: str, world_size: int = 1, timeout_s: float = 120.0) -> tuple[list[int | None], str]:
    """Train a tiny byte-level job to its end; returns exit codes and what was printed."""
    training = start(folder, *overrides, world_size=world_size)
    return training.wait(timeout_s), training.said()


def start(folder: Path, *overrides: str, world_size: int = 1) -> Training:
    """Start a tiny byte-level job whose output lies in ``folder / "run"``."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        corpus.write_text("".join(f"Line {i} says that {i} times {i} is {i * i}.\n" for i in range(400)))
    arguments = [
        f"--model.overrides={TINY_MODEL}",
        f"--dataset.sources=[{{path: {corpus}}}]",
        f"--dataset.cache_dir={folder / 'cache'}",
        f"--training.output_dir={folder / 'run'}",
        "--training.steps=4",
        "--training.seq_len=32",
        "--training.global_batch_size=8",
        "--training.micro_batch_size=2",
        "--optimizer.lr=1e-2",
        "--metrics.tensorboard=false",
        "--accelerator.device=cpu",
        *(f"--{override}" for override in overrides),
    ]
    return Training([arguments], world_size, folder / f"said_{time.monotonic_ns()}.txt")


def train_each(
    folder: Path, jobs: Sequence[list[str]], *, world_size: int = 1, timeout_s: float = 280.0
) -> tuple[list[int | None], str]:
    """Train whole jobs one after the other on the same ranks, until one fails: to start ranks for each takes longer.

    Args:
        folder: For what is printed.
        jobs: Of each the words of the command line.
        world_size: Ranks.
        timeout_s: For all of them.

    Returns:
        Exit codes by rank and what was printed.
    """
    training = Training(jobs, world_size, folder / f"said_{time.monotonic_ns()}.txt")
    return training.wait(timeout_s), training.said()


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The run's metrics.jsonl, whole lines only."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> list[float]:
    """Loss of each step."""
    return [line["loss"] for line in metrics(folder)]


def _train(runs: Sequence[tuple[list[str], int]], rank: int, world_size: int, output: Path) -> None:
    import torch

    torch.set_num_threads(1)
    handle = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if world_size > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
    from torchtrain.train import main

    with (
        contextlib.redirect_stdout(open(1, "w", closefd=False)),
        contextlib.redirect_stderr(open(2, "w", closefd=False)),
    ):
        for arguments, port in runs:
            if world_size > 1:
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            code = main(arguments)
            sys.stdout.flush()
            if code != 0:
                sys.exit(code)


def _free_port() -> int:
    """A port below those that the kernel hands out: nobody is given it before the ranks, which may be seconds later."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
