"""Checkpoints as folders: names, the seal that makes one whole, publishing, pruning.

One process writes through this file (rank 0). What is inside the data files is not its business; no torch here.

A checkpoint is ``step_<8 digits>/`` with DCP's data files and ``.metadata``, ``state.json``, and ``complete.json``, the
seal: written last, it lists every other file with its size. A folder is built under ``<name>.partial`` and renamed, so
that a kill at any moment leaves older checkpoints as they were.

A run that starts anew beside checkpoints of an earlier one writes ``run.json``: what was saved before is not its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

STATE_FILE = "state.json"
SEAL_FILE = "complete.json"
METADATA_FILE = ".metadata"
RUN_FILE = "run.json"

_PARTIAL_SUFFIX = ".partial"
_REPLACED_SUFFIX = ".replaced"
_NAME = re.compile(r"step_(\d{8,})")


def checkpoint_path(folder: Path, step: int) -> Path:
    """Name the checkpoint of a step."""
    return folder / f"step_{step:08d}"


def step_of(path: Path) -> int:
    """Read the step out of a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def partial_path(path: Path) -> Path:
    """Name the folder in which a checkpoint is built."""
    return path.with_name(path.name + _PARTIAL_SUFFIX)


def replaced_path(path: Path) -> Path:
    """Name the folder to which a checkpoint steps aside while another takes its place."""
    return path.with_name(path.name + _REPLACED_SUFFIX)


def give_back_replaced(folder: Path) -> None:
    """Give a checkpoint whose replacement never arrived its name back."""
    for replaced in folder.glob(f"step_*{_REPLACED_SUFFIX}"):
        original = replaced.with_name(replaced.name.removesuffix(_REPLACED_SUFFIX))
        if not original.exists():
            replaced.rename(original)


def clear_leftovers(folder: Path) -> None:
    """Remove what a killed writer left, after giving back what it had set aside; for the folder's one writer."""
    for suffix in (_REPLACED_SUFFIX, _PARTIAL_SUFFIX):
        for leftover in folder.glob(f"step_*{suffix}"):
            clear_leftovers_of(leftover.with_name(leftover.name.removesuffix(suffix)))


def clear_leftovers_of(path: Path) -> None:
    """Remove what a killed writer of one checkpoint left, and nothing of those being written beside it."""
    replaced = replaced_path(path)
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    for leftover in (replaced, partial_path(path)):
        if leftover.exists():
            shutil.rmtree(leftover)


def write_durably(path: Path, text: str) -> None:
    """Write a small file and wait until the disk has it."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def seal(partial: Path) -> None:
    """Write the seal of a folder that is otherwise finished."""
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    content = {"save_index": _next_save_index(partial.parent), "files": sizes}
    write_durably(partial / SEAL_FILE, json.dumps(content, indent=1))


def begin_run(folder: Path) -> list[Path]:
    """Set the checkpoints that are there apart from those of a run that starts anew.

    Returns:
        Those of earlier runs, the last saved first.
    """
    earlier = list_checkpoints(folder)
    if earlier:
        write_durably(folder / RUN_FILE, json.dumps({"first_save_index": _next_save_index(folder)}))
    return earlier


def publish(path: Path) -> None:
    """Rename a sealed folder to its own name; one that is there already steps aside first."""
    replaced = replaced_path(path)
    if path.exists():
        path.rename(replaced)
    partial_path(path).rename(path)
    _sync_folder(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(folder: Path, keep_last: int) -> None:
    """Keep the ``keep_last`` newest whole checkpoints of this run; 0 keeps all. Damaged ones are left for a human."""
    whole = [path for path in list_own_checkpoints(folder) if find_damage(path) is None]
    for path in whole[keep_last:] if keep_last > 0 else []:
        # Renamed first: a kill between two files must not leave a checkpoint that looks damaged.
        path.rename(partial_path(path))
        shutil.rmtree(partial_path(path))


def list_checkpoints(folder: Path) -> list[Path]:
    """List checkpoints, the last saved first, those whose seal is unreadable before all.

    By the order of saving, not by step: a run that went back to an older step has its newest state at a lower one.
    """
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]

    def newest_last(path: Path) -> tuple[float, str]:
        index = _save_index(path)
        return (float("inf") if index is None else index, path.name)

    return sorted(found, key=newest_last, reverse=True)


def list_own_checkpoints(folder: Path) -> list[Path]:
    """List those of the run that started last in this folder, and any whose seal is unreadable."""
    first_index = _first_save_index(folder)
    return [path for path in list_checkpoints(folder) if (index := _save_index(path)) is None or index >= first_index]


def find_damage(path: Path) -> str | None:
    """Say why a checkpoint is not whole; ``None`` when every file is there at its full size."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / SEAL_FILE).is_file():
        return f"{SEAL_FILE} is missing: the save never finished"
    sizes = _read_object(path / SEAL_FILE).get("files")
    if not isinstance(sizes, dict):
        return f"{SEAL_FILE} is unreadable"
    for required in (METADATA_FILE, STATE_FILE):
        if required not in sizes:
            return f"{SEAL_FILE} does not list {required}"
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _save_index(path: Path) -> int | None:
    index = _read_object(path / SEAL_FILE).get("save_index")
    return index if isinstance(index, int) else None


def _next_save_index(folder: Path) -> int:
    indices = [_save_index(path) for path in list_checkpoints(folder)]
    return max([_first_save_index(folder), *(index + 1 for index in indices if index is not None)])


def _first_save_index(folder: Path) -> int:
    return _read_object(folder / RUN_FILE).get("first_save_index", 1)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
