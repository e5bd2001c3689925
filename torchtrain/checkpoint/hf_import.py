"""Start a model from Hugging Face's weights: decide what comes from where, refuse, then read what this rank owns.

The decision is pure and the same on every rank; it needs headers and shapes, no process group and no memory.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtrain.checkpoint.hf_folder import HuggingFaceFolder, SliceReader, StoredTensor, open_folder
from torchtrain.distributed.materialize import local_view
from torchtrain.errors import CheckpointError, Fault, WeightsError
from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import TIED_HEAD
from torchtrain.hugging_face.model_config import read_fields
from torchtrain.hugging_face.weight_map import Piece, Shape, WeightMap, intersect
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")
_MAX_NAMES_SHOWN = 8


@dataclass(frozen=True)
class ModelNames:
    """The names of a whole model, before any of it goes to other ranks."""

    shapes: Mapping[str, Shape]
    """Of each parameter, by its first fqn."""
    aliases: Mapping[str, tuple[str, ...]]
    """Further fqns of tied parameters."""
    buffers: tuple[str, ...]
    """Buffers that checkpoints of ours hold."""


@dataclass(frozen=True)
class FillReport:
    """Where every value of a model comes from, and what becomes of every tensor on disk."""

    loaded: Mapping[str, tuple[Piece, ...]]
    """By fqn."""
    initialised: tuple[str, ...]
    """Parameters that may be missing on disk, and buffers: they start as in a new model."""
    tied_copies: Mapping[str, tuple[Piece, ...]]
    """By fqn, second copies on disk of what is one parameter here: read to see that they are equal."""
    ignored: tuple[str, ...]
    """Tensors on disk that hold nothing of a model."""
    untied: tuple[str, ...] = ()
    """Fqns of those loaded from the tensor to which the checkpoint ties them, where the model does not."""
    missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By fqn, parameters that nothing on disk fills: the tensors that are not there."""
    unused: tuple[str, ...] = ()
    """Tensors on disk that nothing here asks for."""
    wrong_shape: Mapping[str, Shape] = field(default_factory=dict)
    """By name on disk, the shape that it must have."""
    wrong_dtype: tuple[str, ...] = ()
    """Names on disk."""

    @property
    def is_complete(self) -> bool:
        """Whether everything is accounted for."""
        return not (self.missing or self.unused or self.wrong_shape or self.wrong_dtype)

    def find_faults(self, folder: HuggingFaceFolder) -> list[Fault]:
        """List what is not accounted for, of each kind as many as one reads."""

        def fault(name: str, value: object, rule: str, fix: str) -> Fault:
            return Fault(f"{folder.path}: {name}", value, rule, fix)

        stored = folder.tensors
        kinds = (
            [
                fault(name, None, f"must be on disk: {fqn} of the model is made of it", "use weights that are whole")
                for fqn, names in self.missing.items()
                for name in names
            ],
            [
                fault(
                    name,
                    f"{stored[name].dtype} {list(stored[name].shape)}",
                    "is no part of the model",
                    "set model.overrides to the model that the weights are of, or use other weights",
                )
                for name in self.unused
            ],
            [
                fault(
                    name,
                    list(stored[name].shape),
                    f"must be of shape {list(shape)}",
                    "set model.overrides to the sizes of the weights, or use other weights",
                )
                for name, shape in self.wrong_shape.items()
            ],
            [
                fault(name, stored[name].dtype, f"must be {', '.join(_FLOATS)}", "use weights that are not quantised")
                for name in self.wrong_dtype
            ],
        )
        return [fault for faults in kinds for fault in _first_of(faults)]

    def describe(self) -> str:
        """Say in a line what comes from where."""
        parts = [f"{len(self.loaded)} parameters loaded"]
        for what, names in (("initialised", self.initialised), ("unused", self.ignored)):
            parts.append(f"{len(names)} {what}" + (f" ({_show(names)})" if names else ""))
        if self.untied:
            parts.append(f"{len(self.untied)} of them from what they are tied to on disk ({_show(self.untied)})")
        if self.tied_copies:
            parts.append(f"{len(self.tied_copies)} on disk twice, as tied ({_show(self.tied_copies)})")
        return ", ".join(parts)


def read_model_names(model: nn.Module) -> ModelNames:
    """Take the names of a whole model, on any device."""
    first_names = {id(parameter): fqn for fqn, parameter in model.named_parameters()}
    aliases: dict[str, tuple[str, ...]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names[id(parameter)]
        if fqn != first:
            aliases[first] = (*aliases.get(first, ()), fqn)
    persistent = model.state_dict(keep_vars=True).keys()
    return ModelNames(
        shapes={fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()},
        aliases=aliases,
        buffers=tuple(fqn for fqn, _ in model.named_buffers() if fqn in persistent),
    )


def plan_import(
    names: ModelNames,
    stored: Mapping[str, StoredTensor],
    weight_map: WeightMap,
    *,
    may_be_missing: Collection[str] = (),
    tied_there: Mapping[str, str] | None = None,
) -> FillReport:
    """Decide where every parameter comes from.

    Args:
        names: Of the whole model.
        stored: What lies on disk.
        weight_map: The family's.
        may_be_missing: Patterns of parameters that a checkpoint need not have, such as a new head.
        tied_there: Fqn to the one whose values are its own if it has none on disk.
    """
    tied_there = tied_there or {}
    shapes = dict(names.shapes)
    for first, others in names.aliases.items():
        shapes |= dict.fromkeys(others, names.shapes[first])
    loaded: dict[str, tuple[Piece, ...]] = {}
    copies: dict[str, tuple[Piece, ...]] = {}
    missing: dict[str, tuple[str, ...]] = {}
    names_there = sorted(stored)
    untied, initialised = [], list(names.buffers)
    for fqn in names.shapes:
        found = [
            pieces
            for name in (fqn, *names.aliases.get(fqn, ()))
            if (pieces := weight_map.find_stored(name, shapes, stored)) is not None
        ]
        if not found and fqn in tied_there:
            instead = weight_map.find_stored(tied_there[fqn], shapes, stored)
            if instead is not None:
                found.append(instead)
                untied.append(fqn)
        if found:
            loaded[fqn] = found[0]
            if len(found) > 1:
                copies[fqn] = tuple(piece for pieces in found[1:] for piece in pieces)
        elif any(fnmatchcase(fqn, pattern) for pattern in may_be_missing):
            initialised.append(fqn)
        else:
            wanted = weight_map.nearest_layout(fqn, shapes, names_there)
            missing[fqn] = tuple(piece.disk_name for piece in wanted if piece.disk_name not in stored) or (fqn,)
    pieces = [piece for group in (*loaded.values(), *copies.values()) for piece in group]
    used = {piece.disk_name for piece in pieces}
    left = [name for name in stored if name not in used]
    wrong_shape = {
        piece.disk_name: piece.disk_shape for piece in pieces if stored[piece.disk_name].shape != piece.disk_shape
    }
    return FillReport(
        loaded=loaded,
        initialised=tuple(initialised),
        tied_copies=copies,
        ignored=tuple(name for name in left if weight_map.is_ignored(name)),
        untied=tuple(untied),
        missing=missing,
        unused=tuple(name for name in left if not weight_map.is_ignored(name)),
        wrong_shape=wrong_shape,
        wrong_dtype=tuple(name for name in stored if name in used and stored[name].dtype not in _FLOATS),
    )


def plan_folder_import(
    names: ModelNames,
    folder: HuggingFaceFolder,
    hugging_face: HuggingFaceFormat,
    *,
    may_be_missing: Collection[str] = (),
) -> FillReport:
    """Decide as ``plan_import`` does, knowing from the folder's config whether its head is tied.

    Raises:
        WeightsError: Something is not accounted for; it is named.
    """
    is_tied = bool(read_fields(folder.config, hugging_face.config).get("tie_word_embeddings"))
    report = plan_import(
        names,
        folder.tensors,
        hugging_face.weights,
        may_be_missing=may_be_missing,
        tied_there=TIED_HEAD if is_tied else None,
    )
    refuse_incomplete(report, folder)
    return report


def refuse_incomplete(report: FillReport, folder: HuggingFaceFolder) -> None:
    """Refuse a checkpoint that does not fill the model, or holds more than the model.

    Raises:
        WeightsError: It names all that is not accounted for.
    """
    if not report.is_complete:
        raise WeightsError(report.find_faults(folder))


@torch.no_grad()
def load_weights(model: nn.Module, report: FillReport, reader: SliceReader) -> None:
    """Read this rank's part of every loaded parameter straight into it.

    Args:
        model: With memory, sharded or not; of a pipeline stage only its own parameters are read.
        report: Of the whole model.
        reader: Counts what is read.

    Raises:
        WeightsError: A file cannot be read, or two copies of a tied parameter differ.

    Numerics:
        Values are rounded to the parameter's dtype where that is narrower than on disk.
    """
    for fqn, parameter in model.named_parameters():
        local, slices = local_view(parameter)
        if local.numel() == 0:
            continue
        box = tuple(slices)
        for piece in report.loaded.get(fqn, ()):
            overlap = intersect(piece, box)
            if overlap is not None:
                part = local[overlap.ours]
                part.copy_(reader.read(piece.disk_name, overlap.disk).view(part.shape))
        for piece in report.tied_copies.get(fqn, ()):
            overlap = intersect(piece, box)
            if overlap is not None:
                part = local[overlap.ours]
                copy = reader.read(piece.disk_name, overlap.disk).view(part.shape).to(part)
                if not torch.equal(part, copy):
                    rule = f"is another tensor than {fqn}, to which the model ties it"
                    fix = "set model.overrides.tie_word_embeddings to false"
                    raise WeightsError([Fault(piece.disk_name, list(piece.disk_shape), rule, fix)])


def import_weights(
    model: nn.Module,
    names: ModelNames,
    path: Path,
    hugging_face: HuggingFaceFormat,
    *,
    may_be_missing: Collection[str] = (),
) -> FillReport:
    """Fill a sharded model from disk, and say in the log what came from where.

    Args:
        model: This rank's part, with memory.
        names: Of the whole model.
        path: ``model.hf_path``.
        hugging_face: The family's.
        may_be_missing: As for ``plan_import``; they are left alone.

    Raises:
        CheckpointError: On every rank, whichever could not read.

    Collective: the whole world.
    """
    started = time.perf_counter()
    folder, report, num_bytes, refusal = None, None, 0, None
    try:
        folder = open_folder(path)
        report = plan_folder_import(names, folder, hugging_face, may_be_missing=may_be_missing)
        with SliceReader(folder) as reader:
            load_weights(model, report, reader)
            num_bytes = reader.num_bytes
    except CheckpointError as error:
        refusal = str(error)
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (refusal, num_bytes))
    refusals = [text for text, _ in outcomes if text is not None]
    if refusals or report is None or folder is None:
        raise CheckpointError(refusals[0])
    counts = [count / 2**20 for _, count in outcomes]
    logger.info(
        f"{path}: {report.describe()}; {_describe_dtypes(model, folder)}; "
        f"{min(counts):.1f} to {max(counts):.1f} MiB read per rank in {time.perf_counter() - started:.1f} s"
    )
    return report


def _first_of(faults: list[Fault]) -> list[Fault]:
    shown, num_more = faults[:_MAX_NAMES_SHOWN], len(faults) - _MAX_NAMES_SHOWN
    if num_more > 0:
        shown[-1] = replace(shown[-1], rule=f"{shown[-1].rule} (and {num_more} more like it)")
    return shown


def _describe_dtypes(model: nn.Module, folder: HuggingFaceFolder) -> str:
    there = sorted({tensor.dtype for tensor in folder.tensors.values()})
    here = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()})
    return f"{', '.join(there)} on disk, {', '.join(here)} here"


def _show(names: Collection[str]) -> str:
    shown = list(names)[:_MAX_NAMES_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more
