"""Section ``fsdp_config.mix_precision`` in torch's words."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from torchtrain.config.fsdp import MixPrecisionConfig

DTYPES: dict[str | None, torch.dtype | None] = {
    None: None,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def build_mixed_precision(config: MixPrecisionConfig, *, is_root: bool) -> MixedPrecisionPolicy:
    """Translate the section; null dtypes stay null, which means "no cast".

    The root returns token losses, which stay fp32 whatever ``output_dtype`` says; its logits follow the dtype that its
    last block returned (``nn.decoder``).
    """
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
        output_dtype=None if is_root else DTYPES[config.output_dtype],
        cast_forward_inputs=config.cast_forward_inputs,
    )
