"""The dense Qwen3.5 against two oracles, in fp32: the reference, token by token, and Hugging Face's class."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.qwen3_5.architecture import Qwen3_5Architecture
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)

FAMILY = "qwen3_5"
# Why the epsilon is large: see test_qwen3_5_moe_oracles.py.
BASE = Qwen3_5Architecture(
    rms_norm_eps=1e-3,
    vocab_size=97,
    hidden_size=40,
    intermediate_size=46,
    num_hidden_layers=3,
    full_attention_interval=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
ARCHITECTURES = {
    "every_third_attends": BASE,
    "tied_attention_first": replace(
        BASE,
        layer_types=("full_attention", "linear_attention"),
        num_hidden_layers=2,
        hidden_size=45,
        tie_word_embeddings=True,
    ),
}


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_equal_the_reference_packed(name):
    model = random_model(FAMILY, ARCHITECTURES[name])
    assert_equals_reference(model, reference_of(FAMILY, ARCHITECTURES[name], model), *packed_documents())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_equal_hugging_face(name):
    pytest.importorskip("transformers")
    model = random_model(FAMILY, ARCHITECTURES[name])
    assert_equals_hugging_face(model, hugging_face_of(FAMILY, ARCHITECTURES[name], model))
