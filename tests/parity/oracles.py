"""What the comparisons with oracles share: large random weights, a batch, and the comparison of gradients."""

from __future__ import annotations

import torch
from torch import nn

from torchtrain.losses.cross_entropy import IGNORE_INDEX, token_losses
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_GRADIENT

BATCH, TOKENS = 3, 37


def randomised(model: nn.Module) -> nn.Module:
    """Draw large weights, norms and biases too, so that no part of the model can hide behind a zero or a one."""
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if fqn.endswith("norm.weight") else 0.0, std=0.2)
    return model


def random_batch(vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    input_ids_BT = torch.randint(vocab_size, (BATCH, TOKENS))
    labels_BT = torch.randint(vocab_size, (BATCH, TOKENS))
    labels_BT[torch.rand(BATCH, TOKENS) < 0.3] = IGNORE_INDEX
    labels_BT[:, -1] = IGNORE_INDEX
    return input_ids_BT, labels_BT


def unshifted(labels_BT: torch.Tensor) -> torch.Tensor:
    """Labels for Hugging Face, which shifts them itself."""
    unshifted_BT = torch.full_like(labels_BT, IGNORE_INDEX)
    unshifted_BT[:, 1:] = labels_BT[:, :-1]
    return unshifted_BT


def mean_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return token_losses(logits_BTV, labels_BT).sum() / (labels_BT != IGNORE_INDEX).sum()


def plain_mean_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    rows, columns = torch.nonzero(labels_BT != IGNORE_INDEX, as_tuple=True)
    chosen = logits_BTV[rows, columns, labels_BT[rows, columns]]
    return (torch.logsumexp(logits_BTV[rows, columns], dim=-1) - chosen).mean()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        fqn.removeprefix("model."): parameter.grad
        for fqn, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def assert_same_gradients(model: nn.Module, oracle: nn.Module) -> None:
    expected, actual = gradients(oracle), gradients(model)
    assert actual.keys() == expected.keys() == dict(model.named_parameters()).keys()
    errors = {fqn: relative_error(actual[fqn], expected[fqn]) for fqn in actual}
    assert all(gradient.any() for gradient in actual.values())
    assert max(errors.values()) <= MODEL_GRADIENT, errors


def packed_documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and document ids of three differently packed rows; row 1 reuses an id only across rows."""
    lengths_of_rows = [[10, 1, 26], [37], [5, 5, 27]]
    positions = [torch.cat([torch.arange(length) for length in lengths]) for lengths in lengths_of_rows]
    document_ids = [
        torch.cat([torch.full((length,), index, dtype=torch.int32) for index, length in enumerate(lengths)])
        for lengths in lengths_of_rows
    ]
    return torch.stack(positions), torch.stack(document_ids)
