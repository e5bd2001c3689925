"""The memory of the machine, container limits included."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def host_name() -> str:
    """Name the machine; ranks that share it share its memory."""
    return platform.node()


def available_memory_bytes(*, proc: Path = Path("/proc"), cgroups: Path = _CGROUPS) -> int | None:
    """Return how much memory can still be had without swapping: of the machine, and of the container if it has a limit.

    Args:
        proc: The kernel's view of this process.
        cgroups: Where control groups are mounted.

    Returns:
        Bytes; ``None`` where the system does not say, as outside Linux.
    """
    limits = [*_machine(proc / "meminfo"), *_containers(proc / "self" / "cgroup", cgroups)]
    return min(limits, default=None)


def _machine(meminfo: Path) -> Iterator[int]:
    for line in _lines(meminfo):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _containers(membership: Path, cgroups: Path) -> Iterator[int]:
    """Yield what is left under each limit above this process; version 1 and 2 differ in names only."""
    for line in _lines(membership):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache = cgroups / "memory", "total_inactive_file"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(root):
                break
            values = [*_lines(folder / limit), *_lines(folder / usage)]
            if len(values) == 2 and values[0].isdigit():
                # Files that were read lately count as used, but are dropped when memory is wanted.
                stat = dict(line.split() for line in _lines(folder / "memory.stat"))
                reclaimable = int(stat.get(cache, 0))
                yield int(values[0]) - int(values[1]) + reclaimable


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
