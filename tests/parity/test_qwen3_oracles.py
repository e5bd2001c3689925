"""The dense Qwen3 against two oracles, in fp32: the plain-torch reference and Hugging Face's ``Qwen3ForCausalLM``."""

from __future__ import annotations

import pytest
import torch

from models.qwen3.architecture import Qwen3Architecture
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)

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


@ARCHITECTURES
@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "packed"])
def test_logits_loss_and_every_gradient_equal_the_reference(architecture, has_documents):
    model = random_model("qwen3", architecture)
    extra = packed_documents() if has_documents else ()
    assert_equals_reference(model, reference_of("qwen3", architecture, model), *extra)


@ARCHITECTURES
def test_logits_loss_and_every_gradient_equal_hugging_face(architecture):
    pytest.importorskip("transformers")
    model = random_model("qwen3", architecture)
    assert_equals_hugging_face(model, hugging_face_of("qwen3", architecture, model))
