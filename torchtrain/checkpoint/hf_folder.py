"""A folder, or a single file, of Hugging Face safetensors: what lies in it, and the slices of it that a rank asks for.

Which of them a model needs is ``hf_import``'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtrain.errors import CheckpointError
from torchtrain.hugging_face.weight_map import Box, Shape

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk."""

    file: Path
    dtype: str
    """In safetensors' words, as in ``BF16``."""
    shape: Shape


@dataclass(frozen=True)
class HuggingFaceFolder:
    """What a checkpoint says it holds; no values have been read."""

    path: Path
    config_file: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def open_folder(path: Path) -> HuggingFaceFolder:
    """Read the config, the index and the headers.

    Args:
        path: A folder with an index or with one safetensors file, or such a file beside its ``config.json``.

    Raises:
        CheckpointError: Anything is missing, cut short or contradicts the index; the files and tensors are named.
    """
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or folder; point model.hf_path to one")
    config_file = config_file_of(path)
    config = read_config(path)
    index_file = path / INDEX_FILE
    if index_file.is_file():
        return HuggingFaceFolder(path, config_file, config, _read_indexed(path, index_file))
    file = path if path.is_file() else _only_file(path)
    return HuggingFaceFolder(path, config_file, config, _read_header(file))


def config_file_of(path: Path) -> Path:
    """Name the config beside the weights, whether anything is there or not.

    Args:
        path: ``model.hf_path``: a folder, or a safetensors file in it.
    """
    is_file = path.is_file() or (path.suffix == ".safetensors" and not path.is_dir())
    return (path.parent if is_file else path) / CONFIG_FILE


def read_config(path: Path) -> dict[str, Any]:
    """Read the config beside the weights, and nothing else.

    Raises:
        CheckpointError: It is missing, or no object.
    """
    return _read_json(config_file_of(path))


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder}: there is neither {INDEX_FILE} nor a safetensors file")
    if len(files) > 1:
        raise CheckpointError(
            f"{folder}: {INDEX_FILE} is missing, and without it nobody knows whether its {len(files)} safetensors "
            "files are all of them"
        )
    return files[0]


def _read_indexed(folder: Path, index_file: Path) -> dict[str, StoredTensor]:
    listed = _read_json(index_file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise CheckpointError(f"{index_file}: weight_map must map tensors to files")
    found: dict[str, StoredTensor] = {}
    problems = []
    for name in sorted(set(listed.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{index_file}: {name} does not lie beside it")
        file = folder / name
        if not file.is_file():
            count = sum(place == name for place in listed.values())
            problems.append(f"{name}, which {INDEX_FILE} says holds {count} tensors, is missing")
            continue
        tensors = _read_header(file)
        expected = {tensor for tensor, place in listed.items() if place == name}
        problems += [f"{name} lacks {tensor}, which {INDEX_FILE} says it holds" for tensor in expected - tensors.keys()]
        problems += [f"{INDEX_FILE} has no entry for {tensor} of {name}" for tensor in tensors.keys() - expected]
        found |= tensors
    if problems:
        raise CheckpointError(f"{folder}: " + "; ".join(sorted(problems)))
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: StoredTensor(file, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is cut short or no safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold an object")
    return content


class SliceReader:
    """Reads slices of a folder's tensors and counts the bytes; each file is opened once.

    Attributes:
        num_bytes: Bytes of the slices read so far.
    """

    def __init__(self, folder: HuggingFaceFolder) -> None:
        self._folder = folder
        self._files = ExitStack()
        self._opened: dict[Path, Any] = {}
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.clear()
        self._files.close()

    def read(self, name: str, box: Box) -> Tensor:
        """Read a box of a tensor, in its dtype on disk.

        Raises:
            CheckpointError: The file cannot be read any more.
        """
        file = self._folder.tensors[name].file
        try:
            if file not in self._opened:
                self._opened[file] = self._files.enter_context(safe_open(file, framework="pt", device="cpu"))
            values = self._opened[file].get_slice(name)[box]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: {name} cannot be read: {error}") from error
        self.num_bytes += values.numel() * values.element_size()
        return values
