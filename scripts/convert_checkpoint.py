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
import warnings
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
from torchtrain.checkpoint.hf_export import Share, export_weights, find_target_faults
from torchtrain.checkpoint.hf_folder import SliceReader, open_folder
from torchtrain.checkpoint.hf_import import ModelNames, load_weights, plan_folder_import, read_model_names
from torchtrain.checkpoint.hf_side_files import resolve_side_files
from torchtrain.checkpoint.safe_reader import SafeFileSystemReader, read_metadata
from torchtrain.checkpoint.training_state import MAIN_PREFIX
from torchtrain.config.data import TokenizerConfig
from torchtrain.config.load import load_job
from torchtrain.data.tokenizer import Tokenizer, build_tokenizer
from torchtrain.errors import CheckpointError, ConfigError, DataError, Fault, TorchtrainError
from torchtrain.hugging_face.model_config import compare_config, find_export_faults
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
    preset: str
    overrides: Mapping[str, Any]
    hf_path: Path | None
    tokenizer: TokenizerConfig
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
        job.model.preset,
        job.model.overrides,
        None if job.model.hf_path is None else Path(job.model.hf_path),
        job.tokenizer,
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
    side_files = resolve_side_files(
        model.architecture,
        model.spec.hugging_face.config,
        dtype=dtype or str(first.dtype).removeprefix("torch."),
        hf_path=model.hf_path,
        tokenizer=_tokenizer_if_there(model.tokenizer),
        tokenizer_path=None if model.tokenizer.path is None else Path(model.tokenizer.path),
    )
    said = export_weights(
        source,
        target,
        model.spec.hugging_face.weights,
        side_files,
        dtype=None if dtype is None else DTYPES[dtype],
        max_file_bytes=None if max_file_gb is None else int(max_file_gb * _GIB),
    )
    print(f"{target}: {said}")


def convert_from_hf(folder: Path, target: Path, model: JobModel, *, dtype: str | None) -> None:
    """Write a Hugging Face folder as a checkpoint of weights; the whole model is in memory."""
    opened = open_folder(folder)
    where = str(opened.config_file)
    config_format = model.spec.hugging_face.config
    comparison = compare_config(
        opened.config,
        model.architecture,
        config_format,
        overridden=model.overrides,
        where=where,
        preset=model.preset,
        presets=model.spec.presets,
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
    # Only what an earlier attempt at this one left: a job may be saving others beside it.
    layout.clear_leftovers_of(target)
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
        with warnings.catch_warnings():
            # One process is all that there is to be.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            _convert(arguments)
    except TorchtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _convert(arguments: argparse.Namespace) -> None:
    source, target, dtype = arguments.source, arguments.target, arguments.dtype
    if arguments.direction == "to-hf":
        model = read_job_model(arguments.job or _job_beside(source))
        convert_to_hf(source, target, model, dtype=dtype, max_file_gb=arguments.max_file_gb)
    else:
        convert_from_hf(source, _checkpoint_name(target), _named_job(arguments.job), dtype=dtype)


def _job_beside(checkpoint: Path) -> Path:
    if not checkpoint.is_dir():
        rule, fix = (
            "must be a checkpoint of a run: there is no such folder",
            "name one as OUTPUT_DIR/checkpoints/step_N",
        )
        raise ConfigError([Fault("source", str(checkpoint), rule, fix)])
    job = checkpoint.resolve().parent.parent / "job.yaml"
    if not job.is_file():
        rule = f"must lie in the output folder of its run, which keeps its job in {job}: there is no such file"
        raise ConfigError([Fault("source", str(checkpoint), rule, "give --job JOB.yaml")])
    return job


def _tokenizer_if_there(config: TokenizerConfig) -> Tokenizer | None:
    # A checkpoint may be converted where the run's data and tokenizer are not; what then lacks is warned of.
    try:
        return build_tokenizer(config)
    except DataError:
        return None


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
