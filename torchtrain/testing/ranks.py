"""Run a function on several real ranks: fresh processes, a fresh gloo group, one thread each.

A fork server that has torch loaded forks every rank, so that a call on four ranks costs tenths of a second instead of
the seconds that four interpreters need to import torch. Not a launcher: training starts through torchrun.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, cast

from torchtrain.runtime.env import set_launch_env

_PRELOAD = (
    "torch",
    "torch._dynamo",  # The first step of any optimizer imports it, which takes a rank two seconds.
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
_preloaded = list(_PRELOAD)
# How long the other ranks may take to tell of the same failure once one has told of it.
_GRACE_SECONDS = 1.0
_STACK_SECONDS = 0.3

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_preloaded)


@dataclass(frozen=True)
class _Failure:
    """How one rank failed, and when, so that the root cause can be told from its consequences."""

    rank: int
    at: float
    text: str
    is_death: bool = False

    @property
    def precedence(self) -> tuple[bool, float]:
        """Order of blame. A death is noticed late, and what its peers raise is its consequence."""
        return (not self.is_death, self.at)


@dataclass
class _Call:
    """The ranks of one call and what they have answered so far."""

    processes: list[ForkServerProcess]
    connections: list[Connection]
    folder: Path
    results: dict[int, Any] = field(default_factory=dict)
    failures: list[_Failure] = field(default_factory=list)

    def silent_ranks(self) -> list[int]:
        """List the ranks that have neither returned nor failed."""
        answered = self.results.keys() | {failure.rank for failure in self.failures}
        return [rank for rank in range(len(self.processes)) if rank not in answered]

    def collect(self, deadline: float) -> None:
        """Take answers until every rank has answered, or until ``deadline``; a first failure brings it nearer."""
        is_ending = False
        while silent := self.silent_ranks():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            by_connection = {self.connections[rank]: rank for rank in silent}
            for connection in wait(list(by_connection), timeout=remaining):
                self._take(by_connection[cast(Connection, connection)])
            if self.failures and not is_ending:
                is_ending = True
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)

    def _take(self, rank: int) -> None:
        try:
            succeeded, answer = pickle.loads(self.connections[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join(_GRACE_SECONDS)
            text = _describe_death(self.processes[rank].exitcode)
            self.failures.append(_Failure(rank, time.monotonic(), text, is_death=True))
            return
        if succeeded:
            self.results[rank] = answer
        else:
            self.failures.append(answer)

    def python_stack(self, rank: int) -> str:
        """Ask a silent rank where it is; empty when it cannot tell."""
        pid = self.processes[rank].pid
        if pid is None or not self.processes[rank].is_alive():
            return ""
        os.kill(pid, signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        with contextlib.suppress(OSError):
            return _stack_file(self.folder, rank).read_text()
        return ""

    def kill(self) -> None:
        """End the ranks of this call, and no other process."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()


def preload(*modules: str) -> None:
    """Have the fork server import more, so that ranks need not: half a second of a core each, for a whole trainer.

    Args:
        *modules: Importable names; what cannot be imported is left to the ranks. Before the first ``run_ranks``.
    """
    _preloaded.extend(modules)
    _context.set_forkserver_preload(_preloaded)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 120.0, **kwargs: object
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on every rank of a fresh gloo group.

    Args:
        fn: A module-level function of an importable module; it finds its rank through ``torch.distributed``.
        world_size: Ranks to start.
        *args: Passed on, pickled.
        timeout_s: Seconds after which ranks that have not answered are killed.
        **kwargs: Passed on, pickled.

    Returns:
        What ``fn`` returned, by rank. Tensors travel by value.

    Raises:
        AssertionError: A rank raised, died or did not answer; the message holds every rank's traceback, deaths and
            the earliest first.
    """
    payload = pickle.dumps((fn, args, kwargs))
    with tempfile.TemporaryDirectory(prefix="ranks_", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        call = _start(payload, world_size, folder, timeout_s)
        try:
            call.collect(time.monotonic() + timeout_s)
            if call.silent_ranks() or call.failures:
                raise AssertionError(_describe_failure(call, timeout_s))
            for connection in call.connections:
                connection.send_bytes(b"leave")
            for process in call.processes:
                process.join(_GRACE_SECONDS)
        finally:
            call.kill()
    return [call.results[rank] for rank in range(world_size)]


def _start(payload: bytes, world_size: int, folder: Path, timeout_s: float) -> _Call:
    processes, connections = [], []
    for rank in range(world_size):
        ours, theirs = _context.Pipe()
        # Not daemonic: a daemonic process may not start the loader workers that some tests are about.
        process = _context.Process(
            target=_serve, args=(payload, rank, world_size, folder, timeout_s, theirs), daemon=False
        )
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    return _Call(processes, connections, folder)


def _serve(payload: bytes, rank: int, world_size: int, folder: Path, timeout_s: float, parent: Connection) -> None:
    """Be one rank: join the group, call the function, answer, and stay until the parent has heard everyone."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    set_launch_env(rank, world_size)
    with _stack_file(folder, rank).open("w") as stack_file:
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
        try:
            fn, args, kwargs = pickle.loads(payload)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                # Longer than the parent waits: it should be the parent that names the silent ranks.
                timeout=datetime.timedelta(seconds=timeout_s + 60),
            )
            answer = pickle.dumps((True, fn(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, _Failure(rank, time.monotonic(), traceback.format_exc())))
        parent.send_bytes(answer)
        # Leaving now would close connections that slower ranks still read from, and blame them for it.
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()
        if dist.is_initialized():
            dist.destroy_process_group()


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}.txt"


def _describe_death(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"died: killed by {signal.Signals(-exitcode).name}\n"
    return f"died without an answer: exit code {exitcode}\n"


def _describe_failure(call: _Call, timeout_s: float) -> str:
    """Merge what every rank has to say: equal tracebacks once, the earliest first, then the ranks that said nothing."""
    ranks_by_text: dict[str, list[int]] = {}
    for failure in sorted(call.failures, key=lambda failure: failure.precedence):
        ranks_by_text.setdefault(failure.text, []).append(failure.rank)
    parts = [f"{_name_ranks(ranks)}:\n{text}" for text, ranks in ranks_by_text.items()]
    if silent := call.silent_ranks():
        why = "still running when another failed" if call.failures else f"did not answer in {timeout_s:g} s"
        parts.append(f"{_name_ranks(silent)}: {why}")
        if not call.failures:
            parts += [f"rank {rank} was at:\n{call.python_stack(rank)}" for rank in silent]
    return "\n".join(parts)


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
