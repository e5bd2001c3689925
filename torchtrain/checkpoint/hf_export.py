"""Write a model as a Hugging Face checkpoint: every rank its own part of it, straight into the final files.

Needs a file system that all ranks share, as checkpoints do.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.checkpoint import layout
from torchtrain.checkpoint.hf_files import BoxWriter, FilesPlan, create_files, plan_files
from torchtrain.checkpoint.hf_folder import CONFIG_FILE, INDEX_FILE
from torchtrain.checkpoint.hf_side_files import SIDE_FILES, SideFiles
from torchtrain.distributed.materialize import local_view
from torchtrain.errors import Fault, SaveError
from torchtrain.hugging_face.weight_map import Box, Piece, Shape, WeightMap, intersect
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


@dataclass(frozen=True)
class Share:
    """What one process holds of a parameter."""

    shape: Shape
    """Of the whole parameter."""
    box: Box
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Values held."""
        return math.prod(part.stop - part.start for part in self.box)


class WeightSource(Protocol):
    """Where values come from."""

    @property
    def shares(self) -> Mapping[str, Share]:
        """What this process holds, by fqn."""
        ...

    def read(self, fqn: str) -> Tensor:
        """Return those values, of the box's shape."""
        ...


class LiveWeights:
    """A model in memory, sharded or not.

    Args:
        tensors: Parameters by fqn.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._local: dict[str, Tensor] = {}
        self.shares: dict[str, Share] = {}
        for fqn, tensor in tensors.items():
            self._local[fqn], slices = local_view(tensor)
            self.shares[fqn] = Share(tuple(tensor.shape), tuple(slices), tensor.dtype)

    def read(self, fqn: str) -> Tensor:
        """See ``WeightSource``."""
        return self._local[fqn]


def find_target_faults(folder: Path, key: str) -> Iterator[Fault]:
    """Say why an export may not take a folder's place, or those that it needs beside it: they hold what none writes.

    Args:
        folder: Where an export is to go.
        key: What names it, for the message.
    """
    for place in (folder, layout.partial_path(folder), layout.replaced_path(folder)):
        if foreign := _foreign_names(place, may_be_link=place == folder):
            rule = f"must be new or hold an earlier export, which is replaced: there is {', '.join(foreign[:4])}"
            yield Fault(key, str(place), rule, "move that elsewhere, or name another folder")


def _foreign_names(place: Path, *, may_be_link: bool) -> list[str]:
    if place.is_symlink() and not (may_be_link and place.is_dir()):
        return [place.name]
    if not place.is_dir():
        return [place.name] if place.exists() else []
    known = {CONFIG_FILE, INDEX_FILE, *SIDE_FILES}
    return sorted(
        held.name
        for held in place.iterdir()
        if not held.is_file() or (held.name not in known and not _WEIGHT_FILE.fullmatch(held.name))
    )


def export_weights(
    source: WeightSource,
    folder: Path,
    weight_map: WeightMap,
    side_files: SideFiles,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
) -> str:
    """Write a checkpoint that Hugging Face reads; it appears whole, in place of an export that was there.

    Args:
        source: This process's part of the model.
        folder: Where it goes.
        weight_map: The family's.
        side_files: Written by rank 0.
        dtype: On disk; None keeps each parameter's.
        max_file_bytes: Size at which another file begins; None writes one.

    Returns:
        What was written, in a line.

    Raises:
        SaveError: On some rank the disk refused, or values do not fit the dtype; or the folder holds anything else
            than an export.

    Collective: the whole world, where there is a process group.
    """
    started = time.perf_counter()
    folder = folder.resolve()
    rank = dist.get_rank() if dist.is_initialized() else 0
    shares = _of_every_rank(dict(source.shares))
    wholes = {fqn: (share.shape, dtype or share.dtype) for held in shares for fqn, share in held.items()}
    pieces = _pieces(wholes, weight_map)
    plan = plan_files(
        {piece.disk_name: (piece.disk_shape, wholes[fqn][1]) for fqn, group in pieces.items() for piece in group},
        max_bytes=max_file_bytes,
    )
    mine = choose_writers(shares)[rank]
    partial = layout.partial_path(folder)
    _agree(lambda: _begin(folder, plan) if rank == 0 else None, folder)
    _agree(lambda: _write_share(source, mine, wholes, pieces, partial, plan), folder)
    _agree(lambda: _finish(folder, side_files) if rank == 0 else None, folder)
    total = sum(place.num_bytes for place in plan.places.values())
    said = f"{len(plan.places)} tensors, {total / 2**20:.1f} MiB in {len(plan.sizes)} file(s) for Hugging Face"
    logger.info(f"{folder}: {said}, written in {time.perf_counter() - started:.1f} s")
    return said


def choose_writers(shares: Sequence[Mapping[str, Share]]) -> list[list[str]]:
    """Choose one of those that hold the same values, so that every value is written once and the work is spread.

    Args:
        shares: Of each rank.

    Returns:
        For each rank the fqns that it writes its share of.
    """
    holders: dict[str, dict[tuple[tuple[int, int], ...], list[int]]] = {}
    for rank, held in enumerate(shares):
        for fqn, share in held.items():
            if share.numel:
                box = tuple((part.start, part.stop) for part in share.box)
                holders.setdefault(fqn, {}).setdefault(box, []).append(rank)
    chosen: list[list[str]] = [[] for _ in shares]
    for fqn, ranks_by_box in holders.items():
        for box, ranks in ranks_by_box.items():
            chosen[ranks[zlib.crc32(f"{fqn}{box}".encode()) % len(ranks)]].append(fqn)
    return chosen


def _pieces(wholes: Mapping[str, tuple[Shape, torch.dtype]], weight_map: WeightMap) -> dict[str, tuple[Piece, ...]]:
    shapes = {fqn: shape for fqn, (shape, _) in wholes.items()}
    pieces = {fqn: next(weight_map.layouts(fqn, shapes), None) for fqn in shapes}
    nameless = [fqn for fqn, group in pieces.items() if group is None]
    if nameless:
        raise SaveError(f"Hugging Face has no name for {', '.join(nameless)}")
    return {fqn: group for fqn, group in pieces.items() if group is not None}


def _begin(folder: Path, plan: FilesPlan) -> None:
    for fault in find_target_faults(folder, "the folder"):
        raise SaveError(str(fault))
    layout.clear_leftovers_of(folder)
    create_files(layout.partial_path(folder), plan)


def _write_share(
    source: WeightSource,
    fqns: Sequence[str],
    wholes: Mapping[str, tuple[Shape, torch.dtype]],
    pieces: Mapping[str, tuple[Piece, ...]],
    folder: Path,
    plan: FilesPlan,
) -> None:
    writer = BoxWriter(folder, plan)
    try:
        for fqn in fqns:
            local = source.read(fqn).detach()
            for piece in pieces[fqn]:
                overlap = intersect(piece, source.shares[fqn].box)
                if overlap is not None:
                    values = _rounded(local[overlap.ours], wholes[fqn][1], piece.disk_name)
                    writer.write(piece.disk_name, overlap.disk, values)
    finally:
        writer.close()


def _rounded(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Bring values to the CPU in the dtype on disk; only fp16 has less range than what models are trained in."""
    rounded = values.to("cpu", dtype)
    if dtype == torch.float16 and values.dtype != dtype and not rounded.isfinite().all():
        raise SaveError(f"{name} has values that float16 cannot hold: export in bfloat16 or float32")
    return rounded


def _finish(folder: Path, side_files: SideFiles) -> None:
    partial = layout.partial_path(folder)
    layout.write_durably(partial / CONFIG_FILE, json.dumps(side_files.config, indent=2) + "\n")
    for name, file in side_files.copies.items():
        shutil.copyfile(file, partial / name)
    for name, text in side_files.texts.items():
        layout.write_durably(partial / name, text)
    layout.publish(folder)


def _of_every_rank(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _agree(action: Callable[[], None], folder: Path) -> None:
    """Act, and let every rank hear of a rank that could not."""
    refusal = None
    try:
        action()
    except (OSError, SaveError) as error:
        refusal = str(error)
    refusals = [text for text in _of_every_rank(refusal) if text is not None]
    if refusals:
        raise SaveError(f"{folder} was not written for Hugging Face: {refusals[0]}")
