"""Recompute activations in backward instead of keeping them."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtrain.config.training import ActivationCheckpointConfig
from torchtrain.nn.decoder_block import DecoderBlock

# What is dear to compute next to its size. The matmuls inside attention without a fused kernel are left out on purpose:
# theirs are the T x T scores, which are the last thing to keep.
_SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def apply_activation_checkpoint(model: nn.Module, config: ActivationCheckpointConfig) -> nn.Module:
    """Checkpoint decoder blocks in place, as the job says; parameter names stay as they are.

    Args:
        model: A decoder. Blocks are counted in module order from the first that is here.
        config: Section ``activation_checkpoint``.

    Numerics:
        Exact: the recomputation runs the same kernels on the same inputs. Blocks draw no random numbers, so no
        generator state is saved.
    """
    if config.mode == "none":
        return model
    every = config.every_n_blocks if config.mode == "every_nth_block" else 1
    options = {"context_fn": _selective_contexts} if config.mode == "selective_op" else {}
    blocks = [module for module in model.modules() if isinstance(module, DecoderBlock)]
    for block in blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)
    return model


def _selective_contexts() -> tuple:
    return create_selective_checkpoint_contexts(_SAVED_OPS)
