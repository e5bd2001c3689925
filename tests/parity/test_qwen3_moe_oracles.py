"""The Qwen3 with experts against two oracles, in fp32: the plain-torch reference and Hugging Face's class.

Both are asked for logits, loss and every gradient; balance losses are asked of the reference, which sums them token by
token, and in a model of one sparse layer, where the two mean the same, of Hugging Face.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.qwen3_moe.architecture import Qwen3MoeArchitecture
from models.reference.moe import ReferenceMoE
from tests.parity.oracles import (
    assert_equals_hugging_face,
    assert_equals_reference,
    assert_hugging_face_gradients,
    assert_same_gradients,
    hugging_face_of,
    packed_documents,
    random_model,
    reference_of,
)
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.nn.routing import set_auxiliary_loss_factor
from torchtrain.testing.compare import relative_error
from torchtrain.testing.oracles import (
    BATCH,
    TOKENS,
    as_hugging_face,
    gradients,
    mean_loss,
    plain_mean_loss,
    random_batch,
    unshifted,
)
from torchtrain.testing.tolerances import MODEL_GRADIENT, MODEL_OUTPUT

BASE = Qwen3MoeArchitecture(
    vocab_size=96,
    hidden_size=40,
    intermediate_size=56,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
ARCHITECTURES = {
    "normalised": BASE,
    "not_normalised_tied": replace(BASE, norm_topk_prob=False, tie_word_embeddings=True),
    "a_dense_layer": replace(BASE, num_hidden_layers=3, mlp_only_layers=(1,), num_key_value_heads=4),
    "every_second_layer_odd_sizes": replace(
        BASE, decoder_sparse_step=2, hidden_size=45, moe_intermediate_size=23, num_experts=5, num_experts_per_tok=3
    ),
    "all_experts": replace(BASE, num_experts=3, num_experts_per_tok=3, norm_topk_prob=False),
}
FAMILY = "qwen3_moe"
SHARED = replace(BASE, shared_expert_intermediate_size=32)


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "shared_expert"])
def test_logits_loss_and_every_gradient_equal_the_reference(name):
    architecture = ARCHITECTURES.get(name, SHARED)
    model = random_model(FAMILY, architecture)
    assert_equals_reference(model, reference_of(FAMILY, architecture, model), *packed_documents())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_equal_hugging_face(name):
    pytest.importorskip("transformers")
    architecture = ARCHITECTURES[name]
    model = random_model(FAMILY, architecture)
    assert_equals_hugging_face(model, hugging_face_of(FAMILY, architecture, model))


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_balance_losses_equal_their_sums_token_by_token(scope):
    architecture = replace(BASE, router_aux_loss_coef=0.7, router_z_loss_coef=0.3, router_aux_loss_scope=scope)
    model = random_model(FAMILY, architecture)
    reference = reference_of(FAMILY, architecture, model)
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)
    factor = 1.0 / int((labels_BT != IGNORE_INDEX).sum())

    set_auxiliary_loss_factor(model, factor)
    mean_loss(model(input_ids_BT), labels_BT).backward()
    expected_loss = plain_mean_loss(reference(input_ids_BT), labels_BT)
    layers = [module for module in reference.modules() if isinstance(module, ReferenceMoE)]
    for layer in layers:
        balance = 0.7 * layer.auxiliary_loss(is_per_sequence=scope == "sequence") + 0.3 * layer.z_loss()
        expected_loss = expected_loss + factor * balance / len(layers)
    expected_loss.backward()

    assert_same_gradients(model, reference)


def test_the_auxiliary_loss_of_one_sparse_layer_equals_hugging_face():
    architecture = replace(BASE, mlp_only_layers=(0,), router_aux_loss_coef=0.7, router_aux_loss_scope="batch")
    pytest.importorskip("transformers")
    model = random_model(FAMILY, architecture)
    oracle = hugging_face_of(FAMILY, architecture, model)
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)

    set_auxiliary_loss_factor(model, 1.0 / (BATCH * TOKENS))
    mean_loss(model(input_ids_BT), labels_BT).backward()
    oracle(input_ids=input_ids_BT, labels=unshifted(labels_BT), output_router_logits=True).loss.backward()

    assert_hugging_face_gradients(model, oracle)


def test_a_layer_with_a_shared_expert_equals_hugging_face():
    """Qwen2's layer, as Hugging Face's Qwen3 has no shared expert; the rest of both is the same."""
    modeling = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = modeling.Qwen2MoeConfig(
        hidden_size=SHARED.hidden_size,
        moe_intermediate_size=SHARED.moe_intermediate_size,
        shared_expert_intermediate_size=SHARED.shared_expert_intermediate_size,
        num_experts=SHARED.num_experts,
        num_experts_per_tok=SHARED.num_experts_per_tok,
        norm_topk_prob=SHARED.norm_topk_prob,
        experts_implementation="eager",
    )
    layer, oracle = random_model(FAMILY, SHARED).get_submodule("layers.0.mlp"), modeling.Qwen2MoeSparseMoeBlock(config)
    names = {f"mlp.{fqn}": tensor for fqn, tensor in layer.state_dict().items()}
    oracle.load_state_dict({fqn.removeprefix("model.mlp."): w for fqn, w in as_hugging_face(names).items()})
    x_BTD = torch.randn(2, 9, SHARED.hidden_size)

    y_BTD, expected_BTD = layer(x_BTD), oracle(x_BTD)
    for result in (y_BTD, expected_BTD):
        result.square().sum().backward()

    assert relative_error(y_BTD, expected_BTD) <= MODEL_OUTPUT
    actual = as_hugging_face({f"mlp.{fqn}": tensor for fqn, tensor in gradients(layer).items()})
    errors = {fqn: relative_error(actual[f"model.mlp.{fqn}"], p.grad) for fqn, p in oracle.named_parameters()}
    assert max(errors.values()) <= MODEL_GRADIENT, errors
