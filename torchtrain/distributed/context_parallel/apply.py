"""Installs context-parallel attention into a model."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtrain.config.parallel import CpMode
from torchtrain.distributed.context_parallel.allgather import AllGatherCore
from torchtrain.distributed.context_parallel.ring import RingCore
from torchtrain.distributed.context_parallel.sequence_layout import resolve_sequence_layout
from torchtrain.distributed.context_parallel.tail_attention import TailAttention
from torchtrain.distributed.context_parallel.ulysses import UlyssesCore
from torchtrain.distributed.context_parallel.ulysses_delta_net import UlyssesDeltaNetCore
from torchtrain.nn.attention import Attention, AttentionCore
from torchtrain.nn.gated_delta_net import GatedDeltaNet
from torchtrain.runtime.logging import get_logger

logger = get_logger(__name__)


def apply_context_parallel(model: nn.Module, mode: CpMode, cp_mesh: DeviceMesh) -> nn.Module:
    """Replace the core of every layer that mixes tokens, in place.

    The model must then be fed this rank's share of each sequence, as ``resolve_sequence_layout`` cuts it, with its
    positions, and the document ids of the whole sequence.

    Args:
        model: A decoder, or one pipeline stage of it; heads may be one tensor-parallel rank's.
        mode: ``accelerator.cp_mode``.
        cp_mesh: The cp axis.

    Raises:
        ValueError: A layer cannot do the mode, which the job check refuses by the family's ``UNSUPPORTED``: left as it
            is, the layer would take a rank's share for the whole sequence.
    """
    core = _build_core(mode, cp_mesh)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = core
        elif isinstance(module, GatedDeltaNet):
            if mode != "ulysses":
                raise ValueError(f"a gated delta net cannot do context parallelism by {mode}")
            module.core = UlyssesDeltaNetCore(module.core, cp_mesh.get_group())
    return model


def _build_core(mode: CpMode, cp_mesh: DeviceMesh) -> AttentionCore:
    group = cp_mesh.get_group()
    layout = resolve_sequence_layout(mode, cp_mesh.size(), cp_mesh.get_local_rank())
    # The kernel that blocks are attended with is the CPU's; accelerators have better ones behind torch's attention.
    tail = TailAttention(is_blockwise=cp_mesh.device_type == "cpu")
    if mode == "ulysses":
        return UlyssesCore(tail, group)
    if mode == "allgather":
        return AllGatherCore(tail, layout, group)
    if cp_mesh.device_type != "cpu":
        logger.warning(
            "cp_mode ring has no fused attention kernel on %s: it computes scores in fp32, a few rows at a time; "
            "ulysses and allgather use the device's kernels",
            cp_mesh.device_type,
        )
    return RingCore(layout, group)
