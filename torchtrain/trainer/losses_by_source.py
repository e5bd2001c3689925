"""Sums of token losses, in all and per source, kept on the device until the step is over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.data.batch import Batch
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.runtime.device import has_float64


class LossSums:
    """One vector per step: loss sum, then per source its loss sum, then per source its token count."""

    def __init__(self, source_names: Sequence[str], device: torch.device) -> None:
        self._names = tuple(source_names)
        # fp64 keeps counts exact and the sum independent of the number of micro-batches.
        dtype = torch.float64 if has_float64(device) else torch.float32
        self._sums = torch.zeros(1 + 2 * len(self._names), dtype=dtype, device=device)

    @torch.no_grad()
    def add(self, losses_BT: Tensor, batch: Batch) -> None:
        """Add one micro-batch; no host sync."""
        num_sources = len(self._names)
        loss_B = losses_BT.detach().sum(dim=1, dtype=self._sums.dtype)
        self._sums[0] += loss_B.sum()
        tokens_B = (batch.labels_BT != IGNORE_INDEX).sum(dim=1).to(self._sums.dtype)
        self._sums[1 : 1 + num_sources].index_add_(0, batch.source_ids_B, loss_B)
        self._sums[1 + num_sources :].index_add_(0, batch.source_ids_B, tokens_B)

    def reduced(self, group: dist.ProcessGroup) -> Tensor:
        """The vector summed over all ranks that saw different tokens.

        Collective: every rank of ``group``.
        """
        total = self._sums.clone()
        dist.all_reduce(total, group=group)
        return total

    def is_locally_finite(self) -> bool:
        """Whether this rank's own losses are finite; a host sync, for when something has gone wrong."""
        return bool(torch.isfinite(self._sums[0]))

    def by_source(self, sums: Sequence[float]) -> dict[str, float]:
        """Mean loss of each source that had tokens, from the reduced vector."""
        num_sources = len(self._names)
        losses, counts = sums[1 : 1 + num_sources], sums[1 + num_sources :]
        return {name: loss / count for name, loss, count in zip(self._names, losses, counts, strict=True) if count}

    def num_tokens(self, sums: Sequence[float]) -> int:
        """Valid labels of all sources, from the reduced vector."""
        return round(sum(sums[1 + len(self._names) :]))
