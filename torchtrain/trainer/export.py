"""What a run leaves for Hugging Face when it has finished."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.checkpoint.hf_export import LiveWeights, SideFiles, export_weights, find_tokenizer_files
from torchtrain.checkpoint.hf_folder import config_file_of, read_config
from torchtrain.data.tokenizer import Tokenizer
from torchtrain.distributed.fsdp2.precision import DTYPES
from torchtrain.hugging_face.model_config import write_config
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.trainer.run import Run

HUGGING_FACE_FOLDER = "hugging_face"
_GIB = 2**30


def export_model(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, tokenizer: Tokenizer) -> None:
    """Write the model beside the run's checkpoints, as section ``checkpoint`` says.

    Raises:
        SaveError: The disk refused.

    Collective: the whole world.

    Numerics:
        In fp32 the main parameters are written where the optimizer keeps them, and not their low-precision copies.
    """
    config = run.job.checkpoint
    dtype_name = config.export_dtype or run.job.model.init_dtype
    dtype = DTYPES[dtype_name]
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    if isinstance(optimizer, MainParamOptimizer) and dtype == torch.float32:
        mains = optimizer.main_params
        tensors = {fqn: mains.get(parameter, parameter) for fqn, parameter in model.named_parameters()}
    hf_path = None if run.job.model.hf_path is None else Path(run.job.model.hf_path)
    tokenizer_path = None if run.job.tokenizer.path is None else Path(run.job.tokenizer.path)
    hugging_face = run.spec.hugging_face
    side_files = SideFiles(
        config=write_config(
            run.architecture, hugging_face.config, dtype=dtype_name, source=_token_ids(hf_path, tokenizer)
        ),
        copies=find_tokenizer_files(hf_path, tokenizer_path),
    )
    max_file_gb = config.export_max_file_gb
    export_weights(
        LiveWeights(tensors),
        run.output_dir / HUGGING_FACE_FOLDER,
        hugging_face.weights,
        side_files,
        dtype=dtype,
        max_file_bytes=None if max_file_gb is None else int(max_file_gb * _GIB),
    )


def _token_ids(hf_path: Path | None, tokenizer: Tokenizer) -> Mapping[str, Any]:
    # A resumed run does without the folder that its weights once came from.
    if hf_path is not None and config_file_of(hf_path).is_file():
        return read_config(hf_path)
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
