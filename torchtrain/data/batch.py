"""What one micro-batch is.

Shapes: B sequences, T tokens of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtrain.losses.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; everything stands at the position that predicts.

    Shapes:
        input_ids_BT: int64.
        labels_BT: int64, already shifted: the next token; ``IGNORE_INDEX`` where there is nothing to predict.
        positions_BT: int64, counted from 0 in each document.
        document_ids_BT: int32, equal within a document of one sequence; ``None`` asks for plain causal attention.
        source_ids_B: int64, index into ``SequenceDataset.source_names``.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor
    document_ids_BT: Tensor | None
    source_ids_B: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the same batch on a device."""
        documents = self.document_ids_BT
        return Batch(
            input_ids_BT=self.input_ids_BT.to(device, non_blocking=True),
            labels_BT=self.labels_BT.to(device, non_blocking=True),
            positions_BT=self.positions_BT.to(device, non_blocking=True),
            document_ids_BT=None if documents is None else documents.to(device, non_blocking=True),
            source_ids_B=self.source_ids_B.to(device, non_blocking=True),
        )

    def num_valid_tokens(self) -> int:
        """Count the labels that a loss is taken of."""
        return int((self.labels_BT != IGNORE_INDEX).sum())
