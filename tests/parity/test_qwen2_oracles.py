"""Qwen2 against two oracles, in fp32: the plain-torch reference and Hugging Face's ``Qwen2ForCausalLM``."""

from __future__ import annotations

import pytest
import torch

from models.qwen2.architecture import Qwen2Architecture
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)

GROUPED = Qwen2Architecture(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
ODD_TIED = Qwen2Architecture(
    vocab_size=101,
    hidden_size=45,
    intermediate_size=67,
    num_hidden_layers=3,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=22,
    max_position_embeddings=64,
    rms_norm_eps=1e-2,
    rope_theta=100.0,
    tie_word_embeddings=True,
)
ARCHITECTURES = pytest.mark.parametrize("architecture", [GROUPED, ODD_TIED], ids=["grouped_untied", "odd_tied"])


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@ARCHITECTURES
@pytest.mark.parametrize("has_documents", [False, True], ids=["one_document", "packed"])
def test_logits_loss_and_every_gradient_equal_the_reference(architecture, has_documents):
    model = random_model("qwen2", architecture)
    extra = packed_documents() if has_documents else ()
    assert_equals_reference(model, reference_of("qwen2", architecture, model), *extra)


@ARCHITECTURES
def test_logits_loss_and_every_gradient_equal_hugging_face(architecture):
    pytest.importorskip("transformers")
    model = random_model("qwen2", architecture)
    assert_equals_hugging_face(model, hugging_face_of("qwen2", architecture, model))


def test_queries_keys_and_values_have_biases_and_outputs_have_none():
    attention = random_model("qwen2", GROUPED).get_submodule("layers.0.self_attn")
    has_bias = {name: getattr(attention, name).bias is not None for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    assert has_bias == {"q_proj": True, "k_proj": True, "v_proj": True, "o_proj": False}
