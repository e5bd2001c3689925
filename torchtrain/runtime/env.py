"""The only reader and writer of ``os.environ``. Imports no torch.

Launchers speak through torchrun's variables; Slurm and Kubernetes start torchrun, so nothing of theirs is read here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from torchtrain.errors import ConfigError, Fault

_LAUNCH_FIX = "start the ranks with torchrun, which sets it, or unset it for a run on one rank"


@dataclass(frozen=True)
class LaunchEnv:
    """Where this process stands among the ranks of the run."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    is_launched: bool = False
    """A launcher set the variables, so a rendezvous is possible."""


def read_launch_env(environ: Mapping[str, str] | None = None) -> LaunchEnv:
    """Read torchrun's variables.

    Args:
        environ: What to read; ``None`` is this process's environment.

    Returns:
        One rank alone, where no launcher set ``RANK`` and ``WORLD_SIZE``.

    Raises:
        ConfigError: A variable is missing beside the others, no integer, or out of range.
    """
    environ = os.environ if environ is None else environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return LaunchEnv()
    faults: list[Fault] = [
        Fault(path=name, value=None, rule="must be set where RANK or WORLD_SIZE is", fix=_LAUNCH_FIX)
        for name in ("MASTER_ADDR", "MASTER_PORT")
        if not environ.get(name)
    ]
    world_size = _read_count(environ, "WORLD_SIZE", faults)
    rank = _read_index(environ, "RANK", world_size, faults)
    # Both are absent where a launcher starts one process per node; the rank is then alone on its node.
    local_world_size = _read_count(environ, "LOCAL_WORLD_SIZE", faults) if "LOCAL_WORLD_SIZE" in environ else 1
    local_rank = _read_index(environ, "LOCAL_RANK", local_world_size, faults) if "LOCAL_RANK" in environ else 0
    if faults:
        raise ConfigError(faults)
    return LaunchEnv(rank, local_rank, world_size, is_launched=True)


def read_intended_ranks(environ: Mapping[str, str] | None = None) -> int | None:
    """Ranks that a run started from here would have: a launcher's, or those of ``NGPU``; None where neither says so.

    Args:
        environ: What to read; ``None`` is this process's environment.

    Raises:
        ConfigError: As `read_launch_env`, or ``NGPU`` is no number of ranks.
    """
    environ = os.environ if environ is None else environ
    faults: list[Fault] = []
    launch = read_launch_env(environ)
    if launch.is_launched or not environ.get("NGPU"):
        return launch.world_size if launch.is_launched else None
    count = _read_count(environ, "NGPU", faults, fix="write a number of ranks, or unset it")
    if faults:
        raise ConfigError(faults)
    return count


def set_launch_env(rank: int, world_size: int) -> None:
    """Say what torchrun would say to one of several ranks on this node, the rendezvous excepted."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})


def set_env_default(name: str, value: str) -> None:
    """Set a variable that a library reads later, unless the user has set it."""
    os.environ.setdefault(name, value)


def _read_count(environ: Mapping[str, str], name: str, faults: list[Fault], *, fix: str = _LAUNCH_FIX) -> int:
    return _read_int(environ, name, minimum=1, maximum=None, faults=faults, fix=fix)


def _read_index(environ: Mapping[str, str], name: str, count: int, faults: list[Fault]) -> int:
    return _read_int(environ, name, minimum=0, maximum=count - 1, faults=faults)


def _read_int(
    environ: Mapping[str, str],
    name: str,
    *,
    minimum: int,
    maximum: int | None,
    faults: list[Fault],
    fix: str = _LAUNCH_FIX,
) -> int:
    """Read one integer; a bad one becomes a fault and reads as the minimum, so that the rest is still checked."""
    text = environ.get(name)
    try:
        value = int(text) if text is not None else None
    except ValueError:
        value = None
    if value is None or value < minimum or (maximum is not None and value > maximum):
        bound = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        faults.append(Fault(path=name, value=text, rule=f"must be an integer, {bound}", fix=fix))
        return minimum
    return value
