"""The global gradient norm and clipping: every logical element once, in fp32, whatever the topology."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_CHUNK_NUMEL = 2**16


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's part of each gradient, as plain tensors that share memory with it; shards may be empty."""
    return [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def global_gradient_norm(
    parameters: Iterable[nn.Parameter],
    device: torch.device,
    *,
    p: float = 2.0,
    pp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute the p-norm of the whole model's gradient.

    Gradients are grouped by the process groups that hold pieces of them; each group adds up its p-th powers with one
    all-reduce. An axis on which a gradient is replicated is not reduced over, so no element counts twice.

    Args:
        parameters: Parameters whose gradients are reduced already; those without a gradient count as zero.
        device: Where the result lives.
        p: Order of the norm, finite.
        pp_group: One rank of each pipeline stage: their sums are added last, as stages hold different parameters.

    Returns:
        0-d fp32 tensor, equal on all ranks; not synchronised with the host.

    Collective: all ranks that hold pieces of any of the gradients.

    Numerics: squares and sums in fp32 also for low-precision gradients; on a CPU in chunks, see ``_in_chunks``.
    """
    pieces: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            pieces.setdefault(_shard_groups(parameter.grad), []).append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, gradients in pieces.items():
        norms = torch._foreach_norm(_in_chunks(gradients), p, dtype=torch.float32)
        # Offloaded gradients are on the CPU: one number crosses to the device, not one per parameter.
        power = torch.stack(norms).pow(p).sum().to(device)
        for group in groups:
            dist.all_reduce(power, group=group)
        total += power
    if pp_group is not None:
        dist.all_reduce(total, group=pp_group)
    return total.pow(1.0 / p)


def warm_up_gradient_norm(
    parameters: Iterable[nn.Parameter], device: torch.device, *, pp_group: dist.ProcessGroup | None = None
) -> None:
    """Run every collective of the norm once, on a zero gradient, so that the first step does not set them up.

    Args:
        parameters: As for ``global_gradient_norm``, with or without memory.
        device: As there.
        pp_group: As there.

    Collective: as there.
    """
    power = torch.zeros((), dtype=torch.float32, device=device)
    for groups in dict.fromkeys(_shard_groups(parameter.data) for parameter in parameters if parameter.requires_grad):
        for group in groups:
            dist.all_reduce(power, group=group)
    if pp_group is not None:
        dist.all_reduce(power, group=pp_group)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply every gradient in place, this rank's part."""
    if gradients := local_gradients(parameters):
        if isinstance(factor, Tensor):
            factor = factor.to(gradients[0].device)  # Offloaded gradients are on the CPU.
        torch._foreach_mul_(gradients, factor)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that brings ``norm`` down to ``max_norm``, and 1 where it is below: 0-d fp32, no host sync.

    Numerics: the 1e-6 keeps a zero norm finite, as ``torch.nn.utils.clip_grad_norm_`` does.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _in_chunks(gradients: list[Tensor]) -> list[Tensor]:
    """Cut gradients that lie on the CPU into views of ``_CHUNK_NUMEL``.

    torch's norm there adds squares one after another in fp32: 4e-4 off at ten million elements, 1e-2 at a hundred
    million. Norms of chunks, added up, stay below 3e-7. Accelerators add in trees and need no help.
    """
    chunks: list[Tensor] = []
    for gradient in gradients:
        is_long = gradient.device.type == "cpu" and gradient.numel() > _CHUNK_NUMEL
        chunks.extend(gradient.reshape(-1).split(_CHUNK_NUMEL) if is_long else [gradient])
    return chunks


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _shard_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    # Not is_shard(): a strided shard, which FSDP makes of a dim that TP splits too, says it is none.
    return tuple(
        mesh.get_group(axis) for axis, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )
