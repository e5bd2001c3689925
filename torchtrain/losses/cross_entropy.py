"""Cross-entropy per token. Not for averaging: who divides by what is the gradient law's business, in the trainer.

Shape legend: B = batch, T = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

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
    # A copy, not a view: FSDP hooks the output of a forward and warns about views, which its hook may not survive.
    return flat_losses.view_as(labels_BT).clone()


class LogitsLoss:
    """The plain token loss: all logits, then cross-entropy. A ``nn.decoder.TokenLoss``."""

    def __call__(self, x_BTD: Tensor, lm_head: nn.Linear, labels_BT: Tensor) -> Tensor:
        """Score every token; see ``TokenLoss``."""
        return token_losses(lm_head(x_BTD), labels_BT)
