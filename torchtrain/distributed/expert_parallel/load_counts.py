"""Which ranks' counts make up the load of an expert: those that saw other tokens, and no others.

Needed wherever there are several ranks, whether the experts are split or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtrain.nn.routing import routers

_SEQUENCE_AXES = ("cp", "tp")


def axes_of_other_tokens(*, is_sequence_parallel: bool) -> tuple[str, ...]:
    """Axes of ``device_mesh`` along which a router sees other tokens: without sequence parallelism not tp."""
    return ("dp", "cp", "tp") if is_sequence_parallel else ("dp", "cp")


def apply_load_counting(model: nn.Module, device_mesh: DeviceMesh, *, is_sequence_parallel: bool) -> nn.Module:
    """Let the routers' counters add up over ranks, in place.

    Args:
        model: Any; one without routers is left alone.
        device_mesh: Axes (dp, cp, tp) of this pipeline stage.
        is_sequence_parallel: Whether ranks of the tp axis have different tokens between blocks.
    """
    axes = axes_of_other_tokens(is_sequence_parallel=is_sequence_parallel)
    for _, router in routers(model):
        router.counter.sum_over_batch = summing_over(device_mesh, axes)
        router.counter.sum_over_sequence = summing_over(device_mesh, [axis for axis in axes if axis in _SEQUENCE_AXES])
    return model


def summing_over(device_mesh: DeviceMesh, axes: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a function that sums a tensor over mesh axes, into a new tensor.

    Integers are exact, so one axis after the other is as good as all at once, and needs no group of its own.
    """
    groups = [device_mesh[axis].get_group() for axis in axes if device_mesh[axis].size() > 1]

    def add_up(counts: Tensor) -> Tensor:
        total = counts.clone()
        for group in groups:
            dist.all_reduce(total, group=group)
        return total

    return add_up
