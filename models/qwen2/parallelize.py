"""What the techniques make of a Qwen2; in what order stands in ``torchtrain.parallelize``."""

from __future__ import annotations

from torch import nn

from torchtrain.config.job import Job
from torchtrain.distributed.meshes import Meshes
from torchtrain.distributed.tensor_parallel.plan import Style
from torchtrain.parallelize import parallelize_decoder

TENSOR_PARALLEL_TABLE = {
    "embed_tokens": Style.EMBEDDING,
    "layers.*.self_attn": Style.WHOLE_INPUT,
    "layers.*.self_attn.[qkv]_proj": Style.COLUMN,
    "layers.*.self_attn.o_proj": Style.ROW,
    "layers.*.mlp": Style.WHOLE_INPUT,
    "layers.*.mlp.gate_proj": Style.COLUMN,
    "layers.*.mlp.up_proj": Style.COLUMN,
    "layers.*.mlp.down_proj": Style.ROW,
    "layers.*_layernorm": Style.TOKENWISE,
    "norm": Style.TOKENWISE,
    "lm_head": Style.HEAD,
}
"""What tensor parallelism makes of its modules."""


def parallelize_qwen2(model: nn.Module, job: Job, meshes: Meshes) -> tuple[nn.Module, ...]:
    """Apply every technique that the job asks for; returns what is called, in the order of the pipeline."""
    return parallelize_decoder(model, job, meshes, tensor_parallel_table=TENSOR_PARALLEL_TABLE)
