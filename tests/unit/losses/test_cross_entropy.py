from __future__ import annotations

import torch

from torchtrain.losses.cross_entropy import IGNORE_INDEX, token_losses
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_OUTPUT


def test_each_token_gets_its_negative_log_likelihood():
    torch.manual_seed(0)
    logits_BTV, labels_BT = torch.randn(2, 3, 7), torch.randint(7, (2, 3))
    expected_BT = -logits_BTV.log_softmax(-1).gather(-1, labels_BT[..., None])[..., 0]
    assert relative_error(token_losses(logits_BTV, labels_BT), expected_BT) <= MODEL_OUTPUT


def gradient(losses_BT: torch.Tensor, logits_BTV: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(losses_BT.sum(), logits_BTV)[0]


def test_ignored_tokens_lose_nothing_and_teach_nothing():
    logits_BTV = torch.randn(1, 2, 7, requires_grad=True)
    losses_BT = token_losses(logits_BTV, torch.tensor([[3, IGNORE_INDEX]]))
    gradient_BTV = gradient(losses_BT, logits_BTV)
    assert losses_BT[0, 1] == 0
    assert not gradient_BTV[0, 1].any()
    assert gradient_BTV[0, 0].any()


def test_a_fully_ignored_batch_is_zero_not_nan():
    logits_BTV = torch.randn(1, 2, 7, requires_grad=True)
    losses_BT = token_losses(logits_BTV, torch.full((1, 2), IGNORE_INDEX))
    assert not losses_BT.any()
    assert not gradient(losses_BT, logits_BTV).any()


def test_losses_of_bf16_logits_are_fp32():
    logits_BTV = torch.randn(1, 2, 7, dtype=torch.bfloat16)
    losses_BT = token_losses(logits_BTV, torch.tensor([[3, 4]]))
    assert losses_BT.dtype == torch.float32
    assert torch.equal(losses_BT, token_losses(logits_BTV.float(), torch.tensor([[3, 4]])))
