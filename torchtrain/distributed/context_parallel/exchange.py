"""Collectives with gradients: each one's backward is the collective that undoes it, on the same group.

Ranks of a cp group issue them in the order of the layers, in recomputation too, so that they always match.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send ``x[i]`` to rank i and receive its piece for this rank in the same place; backward sends gradients back.

    Args:
        x: First dim is the size of the group.
        group: Ranks of the cp axis.

    Collective: the group.
    """
    return _Exchange.apply(x, group)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stack the tensors of all ranks along a new first dim; backward sums each rank's gradient where it came from.

    Collective: the group.
    """
    return _Gather.apply(x, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        return _all_to_all(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(group.size(), *x.shape)
        dist.all_gather_single(gathered.flatten(), x.contiguous().flatten(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyrefly: ignore[bad-override]
        (grad,) = grads
        mine = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter_single(mine.flatten(), grad.contiguous().flatten(), group=ctx.group)
        return mine, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = x.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received
