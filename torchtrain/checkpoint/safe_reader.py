"""Read DCP checkpoints that somebody else may have written.

DCP's ``.metadata`` is a pickle, which its own reader loads without limits, and entries that are not tensors are pickles
too. Here the metadata may name DCP's records only, non-tensor entries do not exist, and data files must lie beside the
metadata; tensors themselves go through ``torch.load(weights_only=True)`` in DCP.

The one file that knows DCP's private records; ``test_safe_reader`` fails when they change.
"""

from __future__ import annotations

import math
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

from torchtrain.checkpoint.layout import METADATA_FILE
from torchtrain.errors import CheckpointError

_RECORDS = (
    torch.Size,
    _get_layout,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
)
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__name__): record for record in _RECORDS},
    # Python 3.13 calls the module otherwise than those before and after it.
    **{(module, "PosixPath"): PosixPath for module in ("pathlib", "pathlib._local")},
}


class SafeFileSystemReader(FileSystemReader):
    """DCP's reader with the unlimited unpickling taken out."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read ``.metadata`` through the allow-list.

        Raises:
            CheckpointError: As ``read_metadata`` of this module.
        """
        metadata = read_metadata(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return _ALLOWED[module_name, global_name]
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        raise CheckpointError(f"refused to load {module_name}.{global_name}, which no metadata of ours names")


def read_metadata(folder: Path) -> Metadata:
    """Read what a checkpoint says of its tensors, and check that the files can hold them.

    Raises:
        CheckpointError: The metadata is missing, unreadable, names anything but DCP's records, leaves part of a tensor
            out, or points outside the folder or past the end of a file.
    """
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        damage = _find_inconsistency(metadata, folder)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {METADATA_FILE}: {error}") from None
    except Exception as error:  # Damaged pickles raise nearly anything.
        raise CheckpointError(f"{folder}: {METADATA_FILE} cannot be read: {type(error).__name__}: {error}") from error
    if damage is not None:
        raise CheckpointError(f"{folder}: {METADATA_FILE}: {damage}")
    return metadata


def _find_inconsistency(metadata: Metadata, folder: Path) -> str | None:
    if not isinstance(metadata, Metadata):
        return "holds no DCP metadata"
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not a tensor"
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            return f"the chunks of {name} do not add up to its shape {tuple(entry.size)}"
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    for index, place in metadata.storage_data.items():
        if place.relative_path not in sizes:
            return f"{index.fqn} lies in {place.relative_path}, which is not a file of this checkpoint"
        if place.offset < 0 or place.length < 0 or place.offset + place.length > sizes[place.relative_path]:
            return f"{index.fqn} lies past the end of {place.relative_path}"
        if place.transform_descriptors:
            return f"{index.fqn} is stored through a transform"
    return None
