"""Qwen3.5 with experts against two oracles, in fp32: the reference, token by token, and Hugging Face's class.

Hugging Face keeps documents apart in its delta nets only where flash-linear-attention is installed, so packing is asked
of the reference and of documents alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from models.qwen3_5_moe.architecture import Qwen3_5MoeArchitecture
from models.qwen3_5_moe.model import build_qwen3_5_moe
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    assert_same_gradients,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)
from torchtrain.kernels.gated_delta_rule import recurrent
from torchtrain.nn.attention import SDPACore
from torchtrain.nn.gated_delta_net import GatedDeltaNet, LocalDeltaNetCore
from torchtrain.testing.compare import relative_error
from torchtrain.testing.oracles import BATCH, TOKENS, mean_loss, random_batch
from torchtrain.testing.tolerances import MODEL_OUTPUT

# With the usual 1e-6 under the norms a head that says next to nothing is blown up to full length, its rounding with it:
# every oracle is then 5e-5 away from its own result in fp64, and from each other.
BASE = Qwen3_5MoeArchitecture(
    rms_norm_eps=1e-3,
    vocab_size=96,
    hidden_size=40,
    num_hidden_layers=3,
    full_attention_interval=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    partial_rotary_factor=0.5,
    mrope_section=(3, 1, 0),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=20,
    num_experts=6,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
FAMILY = "qwen3_5_moe"
ARCHITECTURES = {
    "every_third_attends": BASE,
    "attention_first_odd_sizes": replace(
        BASE,
        layer_types=("full_attention", "linear_attention"),
        num_hidden_layers=2,
        hidden_size=45,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_conv_kernel_dim=2,
        moe_intermediate_size=23,
        num_experts=5,
        num_experts_per_tok=3,
    ),
}


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_logits_loss_and_every_gradient_equal_the_reference(name, is_packed):
    architecture = ARCHITECTURES[name]
    model = random_model(FAMILY, architecture)
    documents = packed_documents() if is_packed else ()
    assert_equals_reference(model, reference_of(FAMILY, architecture, model), *documents)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_equal_hugging_face(name):
    pytest.importorskip("transformers")
    architecture = ARCHITECTURES[name]
    model = random_model(FAMILY, architecture)
    assert_equals_hugging_face(model, hugging_face_of(FAMILY, architecture, model))


TOLD: list[Tensor | None] = []
"""What those that keep documents apart were given."""


class TellingAttention(SDPACore):
    def build_mask(self, document_ids_BT):
        TOLD.append(document_ids_BT)
        return super().build_mask(document_ids_BT)


class TellingDeltaNet(LocalDeltaNetCore):
    def build_mask(self, document_ids_BT):
        TOLD.append(document_ids_BT)
        return super().build_mask(document_ids_BT)


def test_positions_on_several_axes_equal_hugging_face_and_reach_no_mask():
    """Multimodal positions turn queries and keys; what keeps documents apart is built from document ids alone."""
    pytest.importorskip("transformers")
    model = random_model(FAMILY, BASE)
    oracle = hugging_face_of(FAMILY, BASE, model)
    positions_ABT = torch.randint(0, 50, (3, BATCH, TOKENS)).sort(dim=-1).values
    TOLD.clear()
    for block in model.blocks():
        block.mixer.core = TellingDeltaNet() if block.self_attn is None else TellingAttention()

    assert_equals_hugging_face(model, oracle, positions_ABT)
    assert TOLD == [None, None]

    input_ids_BT, _ = random_batch(BASE.vocab_size)
    _, document_ids_BT = packed_documents()
    several = model(input_ids_BT, positions_ABT, document_ids_BT)
    assert [x.shape for x in TOLD[2:]] == [(BATCH, TOKENS)] * 2
    assert not torch.equal(several, model(input_ids_BT, positions_ABT[0], document_ids_BT))
    with pytest.raises(ValueError, match="one number a token"):
        model(input_ids_BT, None, positions_ABT)


def test_equal_positions_on_all_axes_are_one_position():
    model = random_model(FAMILY, BASE)
    input_ids_BT, _ = random_batch(BASE.vocab_size)
    positions_BT, document_ids_BT = packed_documents()
    one = model(input_ids_BT, positions_BT, document_ids_BT)
    assert torch.equal(one, model(input_ids_BT, positions_BT.expand(3, -1, -1), document_ids_BT))


def test_packed_documents_are_what_they_are_alone():
    model = random_model(FAMILY, BASE)
    input_ids_BT, _ = random_batch(BASE.vocab_size)
    positions_BT, document_ids_BT = packed_documents()
    packed_BTV = model(input_ids_BT, positions_BT, document_ids_BT)
    for row in range(BATCH):
        for document in document_ids_BT[row].unique():
            mine_T = document_ids_BT[row] == document
            alone = model(input_ids_BT[row, mine_T][None])[0]
            assert relative_error(packed_BTV[row, mine_T], alone) <= MODEL_OUTPUT


def test_the_chunked_and_the_recurrent_model_have_equal_gradients():
    input_ids_BT, labels_BT = random_batch(BASE.vocab_size)
    chunked_model = random_model(FAMILY, BASE)
    recurrent_model = build_qwen3_5_moe(BASE)
    recurrent_model.load_state_dict(chunked_model.state_dict())
    for module in recurrent_model.modules():
        if isinstance(module, GatedDeltaNet):
            module.core = LocalDeltaNetCore(recurrent)
    for module in chunked_model.modules():
        if isinstance(module, GatedDeltaNet):
            module.core = LocalDeltaNetCore(chunk_size=16)
    for model in (chunked_model, recurrent_model):
        mean_loss(model(input_ids_BT, *packed_documents()), labels_BT).backward()
    assert_same_gradients(chunked_model, recurrent_model)
