"""From a sharded model without values to one whose weights depend on the seed and the fqn alone.

Each rank draws only the rows it owns, so the same job starts from the same weights on every topology.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.distributed.dtensor_internals import local_slices
from torchtrain.nn.init import InitRule, draw_rows


def materialize(model: nn.Module, device: torch.device, *, buffer_device: torch.device | None = None) -> None:
    """Give every meta parameter and buffer memory; values are undefined, ties are kept.

    Args:
        model: Built on meta, sharded or not.
        device: Where parameters live.
        buffer_device: Where buffers live, if that is elsewhere: offload moves parameters only.

    ``nn.Module.to_empty`` gives each alias of a tied parameter memory of its own, so ties are remembered and restored.
    """
    ties = _tied_names(model)
    model.to_empty(device=device)
    if buffer_device is not None and buffer_device != device:
        for fqn, buffer in list(model.named_buffers()):
            owner, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(owner), name, buffer.to(buffer_device))
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for fqn in others:
            owner, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)


@torch.no_grad()
def initialize_parameters(
    model: nn.Module, rule_for: Callable[[str], InitRule], seed: int, *, only: Collection[str] | None = None
) -> None:
    """Draw every parameter of ``model`` in place, each from (seed, fqn) alone.

    Args:
        model: Materialised model, sharded or not.
        rule_for: Fqn to how it is drawn.
        seed: ``training.seed``.
        only: Fqns to draw, where others get their values elsewhere; None draws all.
    """
    for fqn, parameter in model.named_parameters():
        local, slices = local_view(parameter)
        if local.numel() == 0 or (only is not None and fqn not in only):
            continue
        rows, *columns = slices or [slice(0, 1)]
        drawn = draw_rows(
            rule_for(fqn), seed=seed, fqn=fqn, shape=tuple(parameter.shape), start=rows.start, stop=rows.stop
        )
        local.copy_(drawn[(slice(None), *columns)] if slices else drawn)


def local_view(tensor: Tensor) -> tuple[Tensor, list[slice]]:
    """Return what this rank holds of a tensor, sharing its memory, and the slices of the whole that this is.

    Raises:
        RuntimeError: DTensor does not know which they are: see ``legality`` on uneven parts of a vocabulary.
    """
    if not isinstance(tensor.data, DTensor):
        return tensor.data, [slice(0, size) for size in tensor.shape]
    local, slices = tensor.data.to_local(), local_slices(tensor.data)
    if local.numel() != math.prod(part.stop - part.start for part in slices):
        raise RuntimeError(f"a shard of shape {tuple(local.shape)} cannot be {slices} of {tuple(tensor.shape)}")
    return local, slices


def _tied_names(model: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return [aliases for aliases in names.values() if len(aliases) > 1]
