"""Convert a checkpoint to a Hugging Face folder, or the other way round, in one process and without a process group.

    python scripts/convert_checkpoint.py to-hf outputs/debug/checkpoints/step_00000200 exported
    python scripts/convert_checkpoint.py from-hf weights outputs/mine/checkpoints/step_00000000 --job JOB.yaml

The model is what the job says: the one beside the checkpoint (``job.yaml`` of the run), or ``--job``. A checkpoint made
from a folder holds weights alone; ``checkpoint.resume`` starts its optimizer anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from models.registry import load_spec, resolve_architecture
from torchtrain.checkpoint import layout
from torchtrain.checkpoint.hf_export import Share, SideFiles, export_weights, find_target_faults, find_tokenizer_files
from torchtrain.checkpoint.hf_folder import SliceReader, config_file_of, open_folder, read_config
from torchtrain.checkpoint.hf_import import ModelNames, load_weights, plan_folder_import, read_model_names
from torchtrain.checkpoint.safe_reader import SafeFileSystemReader, read_metadata
from torchtrain.checkpoint.training_state import MAIN_PREFIX
from torchtrain.config.load import load_job
from torchtrain.errors import CheckpointError, ConfigError, Fault, TorchtrainError
from torchtrain.hugging_face.model_config import compare_config, find_export_faults, write_config
from torchtrain.hugging_face.weight_map import whole_box
from torchtrain.model_spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_WEIGHT_PREFIX = "model."
_GIB = 2**30


@dataclass(frozen=True)
class JobModel:
    """What a job says of its model."""

    spec: ModelSpec
    architecture: Any
    overrides: Mapping[str, Any]
    hf_path: Path | None
    tokenizer_path: Path | None
    names: ModelNames


class CheckpointWeights:
    """The weights of a checkpoint, one read at a time.

    Args:
        path: The checkpoint.
        names: Of the model.
        prefers_mains: Read the fp32 main parameter of a weight where there is one.
    """

    def __init__(self, path: Path, names: ModelNames, *, prefers_mains: bool) -> None:
        damage = layout.find_damage(path)
        if damage is not None:
            raise CheckpointError(f"{path}: {damage}")
        self._path = path
        stored = read_metadata(path).state_dict_metadata
        self._entries: dict[str, str] = {}
        self.shares: dict[str, Share] = {}
        wrong = []
        for fqn, shape in names.shapes.items():
            name = _WEIGHT_PREFIX + fqn
            if prefers_mains and MAIN_PREFIX + fqn in stored:
                name = MAIN_PREFIX + fqn
            entry = stored.get(name)
            if not isinstance(entry, TensorStorageMetadata) or tuple(entry.size) != shape:
                wrong.append(fqn)
                continue
            self._entries[fqn] = name
            self.shares[fqn] = Share(shape, whole_box(shape), entry.properties.dtype)
        held = {name.removeprefix(_WEIGHT_PREFIX) for name in stored if name.startswith(_WEIGHT_PREFIX)}
        aliases = {alias for others in names.aliases.values() for alias in others}
        wrong += sorted(held - names.shapes.keys() - aliases - set(names.buffers))
        if wrong:
            raise CheckpointError(f"{path} is of another model: {', '.join(wrong)}")

    def read(self, fqn: str) -> Tensor:
        """See ``WeightSource``."""
        values = torch.empty(self.shares[fqn].shape, dtype=self.shares[fqn].dtype)
        dcp.load({self._entries[fqn]: values}, storage_reader=SafeFileSystemReader(self._path), no_dist=True)
        return values


def read_job_model(path: Path) -> JobModel:
    """Read the model out of a job."""
    job = load_job(path)
    spec = load_spec(job.model.name)
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    with torch.device("meta"):
        names = read_model_names(spec.build(architecture))
    return JobModel(
        spec,
        architecture,
        job.model.overrides,
        None if job.model.hf_path is None else Path(job.model.hf_path),
        None if job.tokenizer.path is None else Path(job.tokenizer.path),
        names,
    )


def convert_to_hf(
    checkpoint: Path, target: Path, model: JobModel, *, dtype: str | None, max_file_gb: float | None
) -> None:
    """Write a checkpoint's weights as a Hugging Face folder; one tensor is in memory at a time."""
    faults = find_export_faults(model.architecture, model.spec.hugging_face.config)
    faults += find_target_faults(target, "target")
    if faults:
        raise ConfigError(faults)
    source = CheckpointWeights(checkpoint, model.names, prefers_mains=dtype == "float32")
    first = next(iter(source.shares.values()))
    config_source = None
    if model.hf_path is not None and config_file_of(model.hf_path).is_file():
        config_source = read_config(model.hf_path)
    config = write_config(
        model.architecture,
        model.spec.hugging_face.config,
        dtype=dtype or str(first.dtype).removeprefix("torch."),
        source=config_source,
    )
    export_weights(
        source,
        target,
        model.spec.hugging_face.weights,
        SideFiles(config, find_tokenizer_files(model.hf_path, model.tokenizer_path)),
        dtype=None if dtype is None else DTYPES[dtype],
        max_file_bytes=None if max_file_gb is None else int(max_file_gb * _GIB),
    )


def convert_from_hf(folder: Path, target: Path, model: JobModel, *, dtype: str | None) -> None:
    """Write a Hugging Face folder as a checkpoint of weights; the whole model is in memory."""
    opened = open_folder(folder)
    where = str(opened.config_file)
    config_format = model.spec.hugging_face.config
    comparison = compare_config(
        opened.config, model.architecture, config_format, overridden=model.overrides, where=where
    )
    if comparison.faults:
        raise ConfigError(comparison.faults)
    report = plan_folder_import(model.names, opened, model.spec.hugging_face)
    module = model.spec.build(model.architecture).to(DTYPES[dtype or "float32"])
    with SliceReader(opened) as reader:
        load_weights(module, report, reader)
    tensors = {f"{_WEIGHT_PREFIX}{fqn}": parameter.detach() for fqn, parameter in module.named_parameters()}
    tensors |= {f"{_WEIGHT_PREFIX}{fqn}": module.get_buffer(fqn) for fqn in model.names.buffers}
    partial = layout.partial_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    layout.clear_leftovers(target.parent)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(partial), no_dist=True)
    step = layout.step_of(target)
    record = {
        "step": step,
        "world_size": 1,
        "has_optimizer_state": False,
        "optimizer_scalars": {},
        "state": {"step": step, "tokens_seen": 0, "sequences_seen": 0},
    }
    layout.write_durably(partial / layout.STATE_FILE, json.dumps(record, indent=1))
    layout.seal(partial)
    layout.publish(target)
    print(f"{target}: {report.describe()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Convert; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("to-hf", "from-hf"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--job", type=Path, help="default for to-hf: job.yaml of the run that saved the checkpoint")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: as stored (to-hf), float32 (from-hf)")
    parser.add_argument("--max-file-gb", type=float, help="GiB after which another file begins; default: one file")
    arguments = parser.parse_args(argv)
    try:
        if arguments.direction == "to-hf":
            model = read_job_model(arguments.job or arguments.source.resolve().parents[1] / "job.yaml")
            convert_to_hf(
                arguments.source, arguments.target, model, dtype=arguments.dtype, max_file_gb=arguments.max_file_gb
            )
        else:
            convert_from_hf(
                arguments.source, _checkpoint_name(arguments.target), _named_job(arguments.job), dtype=arguments.dtype
            )
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _named_job(path: Path | None) -> JobModel:
    if path is None:
        raise ConfigError(
            [Fault("--job", None, "must name the job whose model the folder holds", "give --job JOB.yaml")]
        )
    return read_job_model(path)


def _checkpoint_name(target: Path) -> Path:
    number = target.name.removeprefix("step_")
    if (
        target.name.startswith("step_")
        and number.isdigit()
        and layout.checkpoint_path(target.parent, int(number)) == target
    ):
        return target
    rule = "must be named as a checkpoint is"
    raise ConfigError([Fault("target", str(target), rule, f"write {layout.checkpoint_path(target.parent, 0)}")])


if __name__ == "__main__":
    sys.exit(main())
