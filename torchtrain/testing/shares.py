"""Cuts a batch into what each rank gets, and puts together what ranks hold of a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtrain.data.batch import Batch


def split_batch(whole: Batch, dp_rank: int, dp_size: int, micro_batch_size: int) -> list[Batch]:
    """Take a rank's contiguous share of a global batch, cut into micro-batches.

    Raises:
        ValueError: A rank's sequences do not make whole micro-batches.
    """
    share = whole.input_ids_BT.shape[0] // dp_size
    if share % micro_batch_size:
        raise ValueError(f"{share} sequences a rank do not split into micro-batches of {micro_batch_size}")
    starts = range(dp_rank * share, (dp_rank + 1) * share, micro_batch_size)
    return [_rows(whole, slice(start, start + micro_batch_size)) for start in starts]


def whole_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gather every gradient of this rank's parameters, by fqn.

    Collective: every rank that shares a parameter.
    """
    return {fqn: whole_tensor(p.grad) for fqn, p in model.named_parameters() if p.grad is not None}


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor's global value, as a copy.

    Collective: every rank that holds a part of it.
    """
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _rows(whole: Batch, rows: slice) -> Batch:
    fields: dict[str, Any] = {name: None if value is None else value[rows] for name, value in vars(whole).items()}
    return Batch(**fields)
