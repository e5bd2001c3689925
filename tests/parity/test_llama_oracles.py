"""Llama against two oracles, in fp32: the plain-torch reference of this repo and Hugging Face's ``LlamaForCausalLM``.

Weights are random and large (norms and biases too), so that no part of the model can hide behind a zero or a one.
"""

from __future__ import annotations

import pytest
import torch

from models.llama.architecture import LlamaArchitecture, RopeScaling
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)
from torchtrain.testing.compare import relative_error
from torchtrain.testing.oracles import BATCH, random_batch
from torchtrain.testing.tolerances import MODEL_OUTPUT

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


@ARCHITECTURES
@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "packed"])
def test_logits_loss_and_every_gradient_equal_the_reference(architecture, has_documents):
    model = random_model("llama", architecture)
    extra = packed_documents() if has_documents else ()
    assert_equals_reference(model, reference_of("llama", architecture, model), *extra)


@ARCHITECTURES
def test_logits_loss_and_every_gradient_equal_hugging_face(architecture):
    pytest.importorskip("transformers")
    model = random_model("llama", architecture)
    assert_equals_hugging_face(model, hugging_face_of("llama", architecture, model))


@ARCHITECTURES
def test_packed_documents_equal_the_same_documents_run_alone(architecture):
    model = random_model("llama", architecture)
    input_ids_BT, _ = random_batch(architecture.vocab_size)
    positions_BT, document_ids_BT = packed_documents()

    packed_BTV = model(input_ids_BT, positions_BT, document_ids_BT)

    for row in range(BATCH):
        for document in document_ids_BT[row].unique():
            tokens = document_ids_BT[row] == document
            alone_1TV = model(input_ids_BT[row, tokens][None])
            assert relative_error(packed_BTV[row, tokens], alone_1TV[0]) <= MODEL_OUTPUT


def test_a_changed_token_changes_nothing_before_it_nor_in_other_documents():
    model = random_model("llama", GROUPED)
    input_ids_BT, _ = random_batch(GROUPED.vocab_size)
    positions_BT, document_ids_BT = packed_documents()
    changed_BT = input_ids_BT.clone()
    changed_BT[0, 4] = (changed_BT[0, 4] + 1) % GROUPED.vocab_size

    before_BTV = model(input_ids_BT, positions_BT, document_ids_BT)
    after_BTV = model(changed_BT, positions_BT, document_ids_BT)

    differs_BT = (before_BTV != after_BTV).any(dim=-1)
    assert differs_BT[0, 4:10].all()
    assert differs_BT.sum() == 6
