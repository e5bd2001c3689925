"""Cross-entropy per token. Not for averaging: who divides by what is the gradient law's business, in the trainer.

Shape legend: B = batch, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Compute each token's negative log-likelihood.

    Args:
        logits_BTV: Any float dtype.
        labels_BT: int64, already shifted; ``IGNORE_INDEX`` where nothing is to be learned.

    Returns:
        fp32 ``losses_BT``, exactly 0 with no gradient where the label is ignored.
    """
    flat_losses = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return flat_losses.view_as(labels_BT)
