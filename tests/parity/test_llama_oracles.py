"""Llama against two oracles, in fp32: the plain-torch reference of this repo and Hugging Face's ``LlamaForCausalLM``.

Weights are random and large (norms and biases too), so that no part of the model can hide behind a zero or a one.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
from torch import nn

from models.llama.architecture import LlamaArchitecture, RopeScaling, find_architecture_faults
from models.llama.model import build_llama
from models.reference.dense import ReferenceConfig, ReferenceDecoder
from tests.parity.oracles import (
    BATCH,
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

GROUPED = LlamaArchitecture(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
# An original context of 16 puts the frequencies of a 16-wide head into all three ranges of the scaling.
STRETCHED = LlamaArchitecture(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=64,
    rope_theta=100.0,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=16),
    tie_word_embeddings=True,
)
ODD = LlamaArchitecture(
    vocab_size=101,
    hidden_size=45,
    intermediate_size=67,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=22,
    max_position_embeddings=64,
    rms_norm_eps=1e-2,
    attention_bias=True,
)
ARCHITECTURES = pytest.mark.parametrize(
    "architecture", [GROUPED, STRETCHED, ODD], ids=["grouped_untied", "stretched_tied", "odd_biased"]
)


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def random_llama(architecture: LlamaArchitecture) -> nn.Module:
    assert not find_architecture_faults(architecture)
    return randomised(build_llama(architecture))


def build_reference(architecture: LlamaArchitecture, state_dict: dict) -> nn.Module:
    values = {**asdict(architecture), "has_qk_norm": False}
    known: dict[str, Any] = {field.name: values[field.name] for field in fields(ReferenceConfig)}
    reference = ReferenceDecoder(ReferenceConfig(**known))
    reference.load_state_dict(state_dict)
    return reference


def build_hugging_face(architecture: LlamaArchitecture, state_dict: dict) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    values = asdict(architecture)
    rope_scaling = values.pop("rope_scaling") or {"rope_type": "default"}
    rope_parameters = {**rope_scaling, "rope_theta": values.pop("rope_theta")}
    config = transformers.LlamaConfig(**values, rope_parameters=rope_parameters, attn_implementation="eager")
    oracle = transformers.LlamaForCausalLM(config)
    oracle.load_state_dict({name if name == "lm_head.weight" else f"model.{name}": w for name, w in state_dict.items()})
    return oracle


@ARCHITECTURES
@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "packed"])
def test_logits_and_every_gradient_equal_the_reference(architecture, has_documents):
    model = random_llama(architecture)
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
def test_logits_and_every_gradient_equal_hugging_face(architecture):
    model = random_llama(architecture)
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


@ARCHITECTURES
def test_packed_documents_equal_the_same_documents_run_alone(architecture):
    model = random_llama(architecture)
    input_ids_BT, _ = random_batch(architecture.vocab_size)
    positions_BT, document_ids_BT = packed_documents()

    packed_BTV = model(input_ids_BT, positions_BT, document_ids_BT)

    for row in range(BATCH):
        for document in document_ids_BT[row].unique():
            tokens = document_ids_BT[row] == document
            alone_1TV = model(input_ids_BT[row, tokens][None])
            assert relative_error(packed_BTV[row, tokens], alone_1TV[0]) <= MODEL_OUTPUT


def test_a_changed_token_changes_nothing_before_it_nor_in_other_documents():
    model = random_llama(GROUPED)
    input_ids_BT, _ = random_batch(GROUPED.vocab_size)
    positions_BT, document_ids_BT = packed_documents()
    changed_BT = input_ids_BT.clone()
    changed_BT[0, 4] = (changed_BT[0, 4] + 1) % GROUPED.vocab_size

    before_BTV = model(input_ids_BT, positions_BT, document_ids_BT)
    after_BTV = model(changed_BT, positions_BT, document_ids_BT)

    differs_BT = (before_BTV != after_BTV).any(dim=-1)
    assert differs_BT[0, 4:10].all()
    assert differs_BT.sum() == 6
