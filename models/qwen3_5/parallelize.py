"""What the techniques make of a dense Qwen3.5; in what order stands in ``torchtrain.parallelize``."""

from __future__ import annotations

from torch import nn

from torchtrain.config.job import Job
from torchtrain.distributed.meshes import Meshes
from torchtrain.parallelize import parallelize_decoder


def parallelize_qwen3_5(model: nn.Module, job: Job, meshes: Meshes) -> tuple[nn.Module, ...]:
    """Apply every technique that the job asks for; returns what is called, in the order of the pipeline.

    There is no table for tensor parallelism, which ``UNSUPPORTED`` refuses.
    """
    return parallelize_decoder(model, job, meshes, tensor_parallel_table={})
