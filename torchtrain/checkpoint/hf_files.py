"""Safetensors files that many processes fill at once: their layout is known before any value is.

The library writes a file from one process that holds all of it; here each writes its bytes where the header says they
lie, so that no tensor is gathered and no second pass merges shards. PyTorch's Hugging Face writer leaves files that
have to be merged, and cannot cut a stack of experts into tensors.

Source: the format as the safetensors package documents it: header size in 8 bytes, a JSON header, then the values.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from torchtrain.checkpoint.hf_folder import INDEX_FILE, SINGLE_FILE
from torchtrain.checkpoint.layout import write_durably
from torchtrain.hugging_face.weight_map import Box, Shape

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNMENT = 8


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies."""

    file: str
    offset: int
    """In the file, header included."""
    shape: Shape
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size on disk."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FilesPlan:
    """Every file and every tensor in it."""

    headers: Mapping[str, bytes]
    """First bytes of each file."""
    sizes: Mapping[str, int]
    places: Mapping[str, TensorPlace]


def plan_files(tensors: Mapping[str, tuple[Shape, torch.dtype]], *, max_bytes: int | None) -> FilesPlan:
    """Lay tensors out in files, the same for every topology.

    Args:
        tensors: Shape and dtype by name on disk.
        max_bytes: Values that a file may hold, unless one tensor is larger; None puts all into one.
    """
    names = sorted(tensors, key=_natural)
    groups: list[list[str]] = [[]]
    filled = 0
    for name in names:
        shape, dtype = tensors[name]
        size = math.prod(shape) * dtype.itemsize
        if groups[-1] and max_bytes is not None and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    headers, sizes, places = {}, {}, {}
    for index, group in enumerate(groups, start=1):
        file = SINGLE_FILE if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        headers[file], offsets = _header({name: tensors[name] for name in group})
        for name in group:
            places[name] = TensorPlace(file, offsets[name], *tensors[name])
        sizes[file] = len(headers[file]) + sum(places[name].num_bytes for name in group)
    return FilesPlan(headers, sizes, places)


def create_files(folder: Path, plan: FilesPlan) -> None:
    """Make every file with its header and its full size, and the index where there are several."""
    folder.mkdir(parents=True)
    for file, header in plan.headers.items():
        with (folder / file).open("wb") as opened:
            opened.write(header)
            opened.truncate(plan.sizes[file])
    if len(plan.headers) > 1:
        index = {
            "metadata": {"total_size": sum(place.num_bytes for place in plan.places.values())},
            "weight_map": {name: place.file for name, place in plan.places.items()},
        }
        write_durably(folder / INDEX_FILE, json.dumps(index, indent=2) + "\n")


class BoxWriter:
    """Writes boxes of tensors into files that are there; any number of processes may, each its own boxes."""

    def __init__(self, folder: Path, plan: FilesPlan) -> None:
        self._folder = folder
        self._plan = plan
        self._opened: dict[str, int] = {}

    def write(self, name: str, box: Box, values: Tensor) -> None:
        """Write a box of a tensor.

        Args:
            name: On disk.
            box: Of the tensor.
            values: In the dtype on disk, on the CPU.
        """
        place = self._plan.places[name]
        if place.file not in self._opened:
            self._opened[place.file] = os.open(self._folder / place.file, os.O_WRONLY)
        content = values.contiguous().view(-1).view(torch.uint8).numpy().data
        position = 0
        for start, count in _runs(place.shape, box):
            size = count * place.dtype.itemsize
            _write_all(
                self._opened[place.file],
                content[position : position + size],
                place.offset + start * place.dtype.itemsize,
            )
            position += size

    def close(self) -> None:
        """Bring everything to the disk."""
        for descriptor in self._opened.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._opened.clear()


def _header(tensors: Mapping[str, tuple[Shape, torch.dtype]]) -> tuple[bytes, dict[str, int]]:
    """Return a file's first bytes and where each tensor then begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for name, (shape, dtype) in tensors.items():
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [starts[name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in starts.items()}


def _runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield first element and length of each stretch of a box that lies in one piece, in row-major order."""
    whole = len(shape)
    while whole > 0 and (box[whole - 1].start, box[whole - 1].stop) == (0, shape[whole - 1]):
        whole -= 1
    if whole == 0:
        yield 0, math.prod(shape)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = whole - 1
    count = (box[last].stop - box[last].start) * strides[last]
    for outer in product(*(range(part.start, part.stop) for part in box[:last])):
        start = sum(index * stride for index, stride in zip(outer, strides, strict=False))
        yield start + box[last].start * strides[last], count


def _write_all(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Order layer 10 behind layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
