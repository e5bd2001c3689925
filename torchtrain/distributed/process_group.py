"""The process group: the one place where a run joins and leaves its peers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from torchtrain.errors import TorchtrainError
from torchtrain.runtime.device import has_float64
from torchtrain.runtime.env import LaunchEnv
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

_TURN_TIMEOUT = timedelta(days=1)


@contextmanager
def process_group(launch: LaunchEnv, device: torch.device, backend: str, timeout_s: float) -> Generator[None]:
    """Join the world for the duration of a ``with`` block.

    A single process joins a world of one, so that no caller needs a second code path.

    An exception passes at once: leaving in good order would wait for peers that know nothing of it.

    Args:
        launch: Rank and world size; the rendezvous address comes from torchrun's own variables.
        device: This rank's device.
        backend: A torch backend string, such as ``cpu:gloo,cuda:nccl``.
        timeout_s: Seconds until a collective that a rank does not join fails.
    """
    timeout = timedelta(seconds=timeout_s)
    device_id = device if device.type != "cpu" else None
    if launch.is_launched:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout, device_id=device_id
        )
    try:
        yield
    except TorchtrainError:
        raise  # Whoever started the run says it.
    except Exception:
        logger.exception("this rank failed")
        raise
    # A rank that leaves while another still reads from it looks to that one like a failed peer.
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def in_turns(turn: int, *, num_turns: int) -> Generator[None]:
    """Run a ``with`` block on the ranks of turn 0 first, then on those of turn 1, and so on.

    A rank whose block raises still lets the next ones begin, so that all of them meet the same error by themselves.

    Args:
        turn: This rank's turn, from 0.
        num_turns: How many there are.

    Collective: the whole world.
    """
    # A group of its own: what is worth taking turns for may take longer than any collective of training.
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=_TURN_TIMEOUT))
    try:
        for _ in range(turn):
            dist.barrier(group)
        yield
    finally:
        for _ in range(turn, num_turns - 1):
            dist.barrier(group)


def sum_over(values: list[float], group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Sum host numbers elementwise over a group; ``None`` is the world.

    Numerics: fp64 where the device has it, so token counts stay exact up to 2**53.

    Collective: every rank of ``group``.
    """
    dtype = torch.float64 if has_float64(device) else torch.float32
    total = torch.tensor(values, dtype=dtype, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()
