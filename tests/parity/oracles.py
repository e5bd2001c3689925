"""How our models are held against oracles in tests, and documents packed for it."""

from __future__ import annotations

import torch
from torch import nn

from models.reference.build import build_reference
from models.registry import load_spec
from torchtrain.testing.compare import relative_error
from torchtrain.testing.oracles import (
    as_hugging_face,
    build_hugging_face,
    gradient_errors,
    gradients,
    mean_loss,
    plain_mean_loss,
    random_batch,
    randomised,
    unshifted,
)
from torchtrain.testing.tolerances import FP32_SCALAR, MODEL_GRADIENT, MODEL_OUTPUT


def random_model(family: str, architecture) -> nn.Module:
    return randomised(load_spec(family).build(architecture))


def reference_of(family: str, architecture, model: nn.Module) -> nn.Module:
    reference = build_reference(family, architecture)
    reference.load_state_dict(model.state_dict())
    return reference


def hugging_face_of(family: str, architecture, model: nn.Module) -> nn.Module:
    oracle = build_hugging_face(load_spec(family).hugging_face.config, architecture)
    oracle.load_state_dict(as_hugging_face(model.state_dict()))
    return oracle


def assert_equals_reference(model: nn.Module, reference: nn.Module, *extra: torch.Tensor) -> None:
    """Logits, loss and every gradient of a random batch; ``extra`` are positions and document ids."""
    input_ids_BT, labels_BT = random_batch(model.embed_tokens.num_embeddings)
    logits_BTV, expected_BTV = model(input_ids_BT, *extra), reference(input_ids_BT, *extra)
    loss, expected_loss = mean_loss(logits_BTV, labels_BT), plain_mean_loss(expected_BTV, labels_BT)
    loss.backward()
    expected_loss.backward()

    assert relative_error(logits_BTV, expected_BTV) <= MODEL_OUTPUT
    assert relative_error(loss, expected_loss) <= FP32_SCALAR
    assert_same_gradients(model, reference)


def assert_equals_hugging_face(model: nn.Module, oracle: nn.Module, positions: torch.Tensor | None = None) -> None:
    """Logits, loss and every gradient of a random batch."""
    input_ids_BT, labels_BT = random_batch(model.embed_tokens.num_embeddings)
    logits_BTV = model(input_ids_BT, positions)
    expected = oracle(input_ids=input_ids_BT, position_ids=positions, labels=unshifted(labels_BT))
    loss = mean_loss(logits_BTV, labels_BT)
    loss.backward()
    expected.loss.backward()

    assert relative_error(logits_BTV, expected.logits) <= MODEL_OUTPUT
    assert relative_error(loss, expected.loss) <= FP32_SCALAR
    assert_hugging_face_gradients(model, oracle)


def assert_same_gradients(model: nn.Module, oracle: nn.Module) -> None:
    actual = gradients(model)
    errors = gradient_errors(actual, gradients(oracle))
    assert actual.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.any() for gradient in actual.values())
    assert max(errors.values()) <= MODEL_GRADIENT, errors


def assert_hugging_face_gradients(model: nn.Module, oracle: nn.Module) -> None:
    errors = gradient_errors(as_hugging_face(gradients(model)), gradients(oracle))
    assert len(gradients(model)) == len(dict(model.named_parameters()))
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
