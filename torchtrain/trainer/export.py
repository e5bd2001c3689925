"""What a run leaves for Hugging Face when it has finished."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from torchtrain.checkpoint.hf_export import LiveWeights, export_weights
from torchtrain.checkpoint.hf_side_files import resolve_side_files
from torchtrain.data.tokenizer import Tokenizer
from torchtrain.distributed.fsdp2.precision import DTYPES
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
    side_files = resolve_side_files(
        run.architecture,
        hugging_face.config,
        dtype=dtype_name,
        hf_path=hf_path,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
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
