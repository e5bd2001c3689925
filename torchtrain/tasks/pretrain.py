"""Next-token prediction on every labelled token."""

from __future__ import annotations

from torch import Tensor, nn

from torchtrain.data.batch import Batch


class PretrainTask:
    """Cross-entropy of each token given those before it."""

    def token_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the model and score every token.

        Returns:
            losses_BT, fp32, with a graph; 0 where the label is ignored. Never averaged here: the divisor is global.
        """
        return model(batch.input_ids_BT, batch.positions_BT, batch.document_ids_BT, batch.labels_BT)
