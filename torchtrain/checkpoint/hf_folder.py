"""A folder, or a single file, of Hugging Face safetensors: what lies in it, and the slices of it that a rank asks for.

Which of them a model needs is ``hf_import``'s business.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtrain.errors import Fault, WeightsError
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
        WeightsError: Anything is missing, cut short or contradicts the index; the files and tensors are named.
    """
    if not path.exists():
        rule = "must be a folder of Hugging Face's, or a safetensors file: there is no such file or folder"
        raise WeightsError([Fault("model.hf_path", str(path), rule, "point it to one")])
    config_file = config_file_of(path)
    config = read_config(path)
    index_file = path / INDEX_FILE
    if index_file.is_file():
        tensors = _read_indexed(path, index_file)
        single_file = path / SINGLE_FILE
        if single_file.is_file() and single_file not in {stored.file for stored in tensors.values()}:
            # Hugging Face would read it, and not what the index lists.
            rule = f"must not lie beside {INDEX_FILE}, which does not list it: nobody knows which of the two is meant"
            raise WeightsError([Fault(str(single_file), None, rule, "move away the weights that are not meant")])
        return HuggingFaceFolder(path, config_file, config, tensors)
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
        WeightsError: It is missing, or no object.
    """
    return _read_json(config_file_of(path))


def _only_file(folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        rule = f"must hold {INDEX_FILE} or a safetensors file: there is neither"
        raise WeightsError([Fault("model.hf_path", str(folder), rule, "point it to weights in that format")])
    if len(files) > 1:
        rule = f"must be there: without it nobody knows whether {len(files)} safetensors files are all of them"
        fix = "fetch it, or name one file in model.hf_path"
        raise WeightsError([Fault(str(folder / INDEX_FILE), None, rule, fix)])
    return files[0]


def _read_indexed(folder: Path, index_file: Path) -> dict[str, StoredTensor]:
    listed = _read_json(index_file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        rule = "must map tensors to files"
        raise WeightsError([Fault(f"{index_file}: weight_map", _shown(listed), rule, "fetch the index again")])
    found: dict[str, StoredTensor] = {}
    faults = []
    for name in sorted(set(listed.values())):
        expected = {tensor for tensor, place in listed.items() if place == name}
        file = folder / name
        if Path(name).name != name:
            faults.append(Fault(f"{index_file}: weight_map", name, "must lie beside the index", "put it there"))
        elif not file.is_file():
            rule = f"must be there: {INDEX_FILE} says it holds {len(expected)} tensors"
            faults.append(Fault(str(file), None, rule, "fetch it"))
        else:
            try:
                tensors = _read_header(file)
            except WeightsError as error:
                faults += error.faults
                continue
            faults += _index_faults(file, expected, tensors)
            found |= tensors
    if faults:
        raise WeightsError(faults)
    return found


def _index_faults(file: Path, expected: Collection[str], tensors: Collection[str]) -> Iterator[Fault]:
    for tensor in sorted(set(expected) - set(tensors)):
        rule = f"must hold {tensor}, as {INDEX_FILE} says"
        yield Fault(str(file), f"{len(tensors)} tensors", rule, "fetch the file and the index again")
    for tensor in sorted(set(tensors) - set(expected)):
        rule = f"must be listed in {INDEX_FILE}, as all that {file.name} holds"
        yield Fault(f"{file}: {tensor}", None, rule, "fetch the file and the index again")


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {
                name: StoredTensor(file, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()
            }
    except (SafetensorError, OSError) as error:
        size = f"{file.stat().st_size} bytes" if file.exists() else None
        rule = f"must be a whole safetensors file: it is cut short or none ({error})"
        raise WeightsError([Fault(str(file), size, rule, "fetch it again")]) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError([Fault(str(file), None, "must be there, beside the weights", "fetch it")]) from error
    except (OSError, ValueError, RecursionError) as error:
        rule = f"must be JSON, and cannot be read: {error}"
        raise WeightsError([Fault(str(file), None, rule, "fetch it again")]) from error
    if not isinstance(content, dict):
        raise WeightsError([Fault(str(file), _shown(content), "must hold an object", "fetch it again")])
    return content


def _shown(content: object) -> str:
    return f"a {type(content).__name__}"


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
            WeightsError: The file cannot be read any more.
        """
        file = self._folder.tensors[name].file
        try:
            if file not in self._opened:
                self._opened[file] = self._files.enter_context(safe_open(file, framework="pt", device="cpu"))
            values = self._opened[file].get_slice(name)[box]
        except (SafetensorError, OSError) as error:
            rule = f"must be readable, as it was before: {error}"
            raise WeightsError(
                [Fault(f"{file}: {name}", None, rule, "leave the files alone until they are read")]
            ) from error
        self.num_bytes += values.numel() * values.element_size()
        return values
