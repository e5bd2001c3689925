"""The process group: the one place where a run joins and leaves its peers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from torchtrain.errors import LostPeerError, TorchtrainError
from torchtrain.runtime.device import has_float64
from torchtrain.runtime.env import LaunchEnv
from torchtrain.runtime.logging import FILE_ONLY, get_logger

logger = get_logger(__name__)

_TURN_TIMEOUT = timedelta(days=1)
# What gloo, NCCL and the store of the rendezvous say when a rank is not there.
_SIGNS_OF_LOSS = ("closed by peer", "reset by peer", "refused", "broken pipe", "timed out", "timeout", "remote process")
_MESH_PREFIX = "mesh_"  # How a device mesh describes the group of one of its axes.


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

    Raises:
        LostPeerError: Another rank is gone or silent; the traceback is in this rank's log.
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
        # A rank that leaves while another still reads from it looks to that one like a failed peer.
        dist.barrier()
    except TorchtrainError:
        raise  # Whoever started the run says it.
    except Exception as error:
        if not is_lost_peer(error):
            logger.exception("this rank failed")
            raise
        logger.exception("another rank is gone or silent", extra=FILE_ONLY)
        raise LostPeerError(_describe_loss(error, timeout_s)) from error
    dist.destroy_process_group()


def is_lost_peer(error: Exception) -> bool:
    """Whether a collective failed because another rank did not answer, by the words of torch's backends."""
    if not isinstance(error, RuntimeError):
        return False
    words = str(error).lower()
    is_of_backend = isinstance(error, dist.DistError) or "gloo" in words
    return is_of_backend and any(sign in words for sign in _SIGNS_OF_LOSS)


def _describe_loss(error: Exception, timeout_s: float) -> str:
    axis = _find_axis(error)
    where = f" in a collective of {axis}" if axis else ""
    return (
        f"another rank is gone or silent{where}: {str(error).splitlines()[0]}\n"
        "  Look first at the logs of the other ranks, logs/rank_*.log in training.output_dir: one of them may say why. "
        f"If all are well but slow, raise accelerator.dist_timeout_s = {timeout_s:g}. Start again with "
        "checkpoint.resume: auto to go on from the newest checkpoint."
    )


def _find_axis(error: Exception) -> str | None:
    """The mesh axis of the group that a frame of the failed call held last, if torch named it for one."""
    name, traceback = None, error.__traceback__
    while traceback is not None:
        held = (traceback.tb_frame.f_locals.get(word) for word in ("group", "pg"))
        for group in held:
            if isinstance(group, dist.ProcessGroup) and group.group_desc.startswith(_MESH_PREFIX):
                name = f"axis {group.group_desc.removeprefix(_MESH_PREFIX)}"
        traceback = traceback.tb_next
    return name


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
