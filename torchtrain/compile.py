"""``torch.compile``, block by block: one small graph, compiled once and used by every layer."""

from __future__ import annotations

import torch
from torch import nn

from torchtrain.config.training import CompileConfig
from torchtrain.nn.decoder_block import DecoderBlock


def apply_compile(model: nn.Module, config: CompileConfig) -> nn.Module:
    """Compile the forward of each decoder block in place; parameter names stay as they are.

    Only the forward of the instance is replaced, so that module hooks, FSDP's among them, stay outside the graph.

    Args:
        model: A decoder, with activation checkpointing already applied.
        config: Section ``compile``.
    """
    if not config.enabled:
        return model
    for block in (module for module in model.modules() if isinstance(module, DecoderBlock)):
        block.forward = torch.compile(
            block.forward, backend=config.backend, fullgraph=config.fullgraph, dynamic=config.dynamic
        )
    return model
