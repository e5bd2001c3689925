"""The dense Qwen3 against two oracles, in fp32: the plain-torch reference and Hugging Face's ``Qwen3ForCausalLM``."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from torch import nn

from models.qwen3.architecture import Qwen3Architecture, find_architecture_faults
from models.qwen3.model import build_qwen3
from models.reference.dense import ReferenceConfig, ReferenceDecoder
from tests.parity.oracles import (
    assert_same_gradients,
    mean_loss,
    packed_documents,
    plain_mean_loss,
    random_batch,
    randomised,
    unshifted,
)
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR, MODEL_OUTPUT

# A head size that is no quotient of the others, grouped keys; then tied, odd sizes and biases.
GROUPED = Qwen3Architecture(
    vocab_size=96,
    hidden_size=40,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
TIED = Qwen3Architecture(
    vocab_size=101,
    hidden_size=45,
    intermediate_size=67,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=22,
    max_position_embeddings=64,
    rms_norm_eps=1e-2,
    attention_bias=True,
    tie_word_embeddings=True,
)
ARCHITECTURES = pytest.mark.parametrize("architecture", [GROUPED, TIED], ids=["grouped_untied", "odd_biased_tied"])


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def random_qwen3(architecture: Qwen3Architecture) -> nn.Module:
    assert not find_architecture_faults(architecture)
    return randomised(build_qwen3(architecture))


def build_reference(architecture: Qwen3Architecture, state_dict: dict) -> nn.Module:
    values = {**asdict(architecture), "rope_scaling": None, "has_qk_norm": True}
    known: dict[str, Any] = {field.name: values[field.name] for field in fields(ReferenceConfig)}
    reference = ReferenceDecoder(ReferenceConfig(**known))
    reference.load_state_dict(state_dict)
    return reference


def build_hugging_face(architecture: Qwen3Architecture, state_dict: dict) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    values = asdict(architecture)
    rope_parameters = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    config = transformers.Qwen3Config(**values, rope_parameters=rope_parameters, attn_implementation="eager")
    oracle = transformers.Qwen3ForCausalLM(config)
    oracle.load_state_dict({name if name == "lm_head.weight" else f"model.{name}": w for name, w in state_dict.items()})
    return oracle


@ARCHITECTURES
@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "packed"])
def test_logits_loss_and_every_gradient_equal_the_reference(architecture, has_documents):
    model = random_qwen3(architecture)
    reference = build_reference(architecture, model.state_dict())
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)
    extra = packed_documents() if has_documents else ()

    logits_BTV, expected_BTV = model(input_ids_BT, *extra), reference(input_ids_BT, *extra)
    loss, expected_loss = mean_loss(logits_BTV, labels_BT), plain_mean_loss(expected_BTV, labels_BT)
    loss.backward()
    expected_loss.backward()

    assert relative_error(logits_BTV, expected_BTV) <= MODEL_OUTPUT
    assert relative_error(loss, expected_loss) <= FP32_SCALAR
    assert_same_gradients(model, reference)


@ARCHITECTURES
def test_logits_loss_and_every_gradient_equal_hugging_face(architecture):
    model = random_qwen3(architecture)
    oracle = build_hugging_face(architecture, model.state_dict())
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)

    logits_BTV = model(input_ids_BT)
    expected = oracle(input_ids=input_ids_BT, labels=unshifted(labels_BT))
    loss = mean_loss(logits_BTV, labels_BT)
    loss.backward()
    expected.loss.backward()

    assert relative_error(logits_BTV, expected.logits) <= MODEL_OUTPUT
    assert relative_error(loss, expected.loss) <= FP32_SCALAR
    assert_same_gradients(model, oracle)
