"""The one file that uses DTensor's private functions: where a local shard lies in its global tensor."""

from __future__ import annotations

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_slices(tensor: DTensor) -> list[slice]:
    """Slices of the global tensor that this rank holds, one per dim; empty where it holds nothing."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [slice(start, start + size) for start, size in zip(offset, shape, strict=True)]
