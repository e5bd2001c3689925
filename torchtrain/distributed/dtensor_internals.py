"""The one file that uses DTensor's private functions: where a local shard lies in its global tensor."""

from __future__ import annotations

from itertools import product

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import (
    _compute_local_shape_and_global_offset,
    compute_local_shape_and_global_offset,
)


def local_slices(tensor: DTensor) -> list[slice]:
    """Slices of the global tensor that this rank holds, one per dim; empty where it holds nothing."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]


def slices_by_coordinate(tensor: DTensor) -> dict[tuple[int, ...], tuple[slice, ...]]:
    """Slices of the global tensor that each coordinate of its mesh holds; pure arithmetic, no communication."""
    boxes = {}
    for coordinate in product(*map(range, tensor.device_mesh.shape)):
        shape, offset = _compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh.shape, list(coordinate), tensor.placements
        )
        boxes[coordinate] = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return boxes
