"""Recompute activations in backward instead of keeping them."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtrain.config.training import ActivationCheckpointConfig
from torchtrain.kernels.grouped_mm import GROUPED_MM_OPERATOR
from torchtrain.nn.decoder_block import DecoderBlock
from torchtrain.nn.moe import MoE
from torchtrain.nn.recomputation import Memory

# What is dear to compute next to its size. The matmuls inside attention without a fused kernel are left out on purpose:
# theirs are the T x T scores, which are the last thing to keep.
_SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    GROUPED_MM_OPERATOR,
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
        generator state is saved. Which experts a token visits is chosen once, in every mode: see ``nn.recomputation``.
    """
    if config.mode == "none":
        return model
    every = config.every_n_blocks if config.mode == "every_nth_block" else 1
    blocks = [module for module in model.modules() if isinstance(module, DecoderBlock)]
    for block in blocks[::every]:
        options = _options(block, is_selective=config.mode == "selective_op")
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)
    return model


def _options(block: DecoderBlock, *, is_selective: bool) -> dict[str, Any]:
    if any(isinstance(module, MoE) for module in block.modules()):
        return {"context_fn": partial(_remembering_contexts, is_selective)}
    # Compile understands this function and no other.
    return {"context_fn": _selective_contexts} if is_selective else {}


def _selective_contexts() -> tuple:
    return create_selective_checkpoint_contexts(_SAVED_OPS)


def _remembering_contexts(is_selective: bool) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of the forward and of the recomputation that share what ``nn.recomputation.keep`` kept."""
    memory = Memory()
    first, second = _selective_contexts() if is_selective else (nullcontext(), nullcontext())
    return _Together(first, memory.recording()), _Together(second, memory.replaying())


class _Together(AbstractContextManager[None]):
    def __init__(self, *contexts: AbstractContextManager) -> None:
        self._contexts = contexts
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
