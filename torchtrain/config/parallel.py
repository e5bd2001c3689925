"""Sections ``accelerator`` and ``dist_config``: how the ranks are laid out and which expert topology is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.section import Section

CpMode = Literal["ulysses", "allgather", "ring"]
PpSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
EpDispatcher = Literal["eager", "fused", "domino", "mc2"]


@dataclass(frozen=True, kw_only=True)
class AcceleratorConfig(Section):
    """The public parallel topology."""

    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """Device type. ``auto`` takes the accelerator that torch finds, else the CPU."""
    tp_size: int = 1
    """Tensor-parallel ranks."""
    cp_size: int = 1
    """Context-parallel ranks. CP never enlarges the FSDP shard degree."""
    ep_size: int = 1
    """Expert-parallel ranks, carved out of dp x cp x tp of one pipeline stage."""
    pp_size: int = 1
    """Pipeline stages, each a contiguous block of ranks."""
    sequence_parallel: bool = False
    """With TP, shard the activations between blocks along the sequence."""
    loss_parallel: bool = False
    """With TP, compute cross-entropy on vocabulary shards."""
    cp_mode: CpMode = "ulysses"
    """How attention sees the whole sequence under CP."""
    pp_schedule: PpSchedule = "1F1B"
    """Pipeline schedule."""
    pp_micro_batch_size: int | None = None
    """Sequences per pipeline micro-batch; null means ``training.micro_batch_size``."""
    pp_layers: tuple[int, ...] | None = None
    """Decoder layers of each stage, in stage order; null balances. GPipe and 1F1B have one stage a rank, others two."""
    backend: Literal["gloo", "nccl", "hccl"] | None = None
    """Collective backend of the device's tensors; null picks the device's own. Tensors on the CPU travel by gloo."""
    dist_timeout_s: float = 600.0
    """Seconds after which a collective that nobody answers fails."""


@dataclass(frozen=True, kw_only=True)
class DistConfig(Section):
    """The distributed plugin and its private keys."""

    name: Literal["fsdp2", "fsdpturbo"] = "fsdp2"
    """``fsdp2``: one manager for all; ``fsdpturbo``: experts first, on a mesh of their own."""
    ep_dispatcher: EpDispatcher = "eager"
    """How tokens travel to their experts."""
    ep_size: int | None = None
    """fsdpturbo only: expert-parallel ranks."""
    fsdp_ignored_modules: tuple[str, ...] = ()
    """fsdpturbo only: module patterns kept out of the outer FSDP."""
    hook_modules: tuple[str, ...] = ()
    """fsdpturbo only: module patterns that carry the expert-side FSDP hooks."""
    fsdp_implementation: Literal["native", "custom"] = "native"
    """fsdpturbo only: expert-side FSDP implementation."""
