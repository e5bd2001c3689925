"""Sections ``training``, ``task``, ``activation_checkpoint`` and ``compile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How much is trained, in which portions."""

    steps: int = 100
    """Optimizer steps."""
    seq_len: int = 256
    """Tokens per sequence."""
    global_batch_size: int = 8
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int = 1
    """Sequences per rank and micro-batch."""
    loss_chunk_size: int | None = None
    """Tokens of a micro-batch whose logits exist at a time, computed again in backward; null keeps those of all."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; null does not clip (the norm is still reported)."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    deterministic: bool = False
    """Ask torch for deterministic kernels, fail where there is none."""
    gc_interval: int = 50
    """Collect Python garbage every this many steps, on all ranks together; 0 leaves it to Python."""
    output_dir: str = "outputs/run"
    """Folder for logs, checkpoints and the resolved job."""


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Section):
    """What is learned, and how it is looked at meanwhile."""

    name: Literal["pretrain", "sft"] = "pretrain"
    """``pretrain``: next-token prediction on every token; ``sft``: on the answers of conversations only."""
    eval_interval: int = 0
    """Evaluate on held-out sequences every this many steps; 0 never does."""
    eval_sequences: int = 64
    """Held-out sequences per evaluation, over all ranks."""
    sample_prompt: str | None = None
    """Prompt continued at the end of the run; null samples nothing."""
    sample_tokens: int = 64
    """Tokens to sample."""
    sample_temperature: float = 0.8
    """Sampling temperature; 0 is greedy."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig(Section):
    """What is recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective_op", "every_nth_block"] = "none"
    """``full``: every block; ``selective_op``: keep matmul and attention outputs; ``every_nth_block``: some blocks."""
    every_n_blocks: int = 2
    """For ``every_nth_block``: checkpoint one block in this many."""
    recompute_exchange: bool = False
    """With expert parallelism, exchange tokens again in the recomputation instead of keeping what was received: less
    memory, six exchanges of rows a layer for four."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig(Section):
    """``torch.compile``, block by block."""

    enabled: bool = False
    """Compile each decoder block."""
    fullgraph: bool = False
    """Fail on a graph break; not with FSDP nor with experts, which break the graph."""
    backend: str = "inductor"
    """Compiler backend."""
    dynamic: bool | None = None
    """Dynamic shapes; null lets torch decide."""
