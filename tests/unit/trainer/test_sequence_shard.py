"""What a rank takes from a prompt whose tokens are shared out."""

from __future__ import annotations

import torch

from torchtrain.trainer.sequence_shard import Prompt


def test_logits_after_the_last_token_are_zeros_elsewhere_even_where_other_logits_are_infinite() -> None:
    ids, logits_1TV = torch.zeros(1, 2, dtype=torch.long), torch.full((1, 2, 3), float("inf"))
    elsewhere = Prompt(ids, ids, 0, holds_last=False).logits_after(logits_1TV)
    assert elsewhere.tolist() == [0.0, 0.0, 0.0]
    logits_1TV[0, 1] = torch.tensor([1.0, 2.0, 3.0])
    assert Prompt(ids, ids, 1, holds_last=True).logits_after(logits_1TV).tolist() == [1.0, 2.0, 3.0]
