"""Next-token prediction on every labelled token."""

from __future__ import annotations

from torch import Tensor, nn

from torchtrain.data.batch import Batch


class PretrainTask:
    """Cross-entropy of each token given those before it."""

    def arguments(self, batch: Batch) -> dict[str, Tensor]:
        """Say what the model is called with, by name; first dim B. ``inputs`` are the ids."""
        arguments = {"inputs": batch.input_ids_BT, "positions_BT": batch.positions_BT, "labels_BT": batch.labels_BT}
        documents = {} if batch.document_ids_BT is None else {"document_ids_BT": batch.document_ids_BT}
        return arguments | documents

    def token_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model and score every token.

        Returns:
            losses_BT, fp32, with a graph; 0 where the label is ignored. Never averaged here: the divisor is global.
        """
        return model(**self.arguments(batch))
