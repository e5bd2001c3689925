"""The Qwen3 with experts against two oracles, in fp32: the plain-torch reference and Hugging Face's class.

Both are asked for logits, loss and every gradient; balance losses are asked of the reference, which sums them token by
token, and in a model of one sparse layer, where the two mean the same, of Hugging Face.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from models.qwen3_moe.architecture import Qwen3MoeArchitecture, find_architecture_faults
from models.qwen3_moe.model import build_qwen3_moe
from models.reference.dense import ReferenceConfig
from models.reference.moe import ReferenceMoE, ReferenceMoEConfig, build_reference_moe
from tests.parity.oracles import (
    BATCH,
    TOKENS,
    assert_same_gradients,
    mean_loss,
    packed_documents,
    plain_mean_loss,
    random_batch,
    randomised,
    unshifted,
)
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.nn.routing import set_auxiliary_loss_factor
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import FP32_SCALAR, MODEL_GRADIENT, MODEL_OUTPUT

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
SHARED = replace(BASE, shared_expert_intermediate_size=32)


@pytest.fixture(autouse=True)
def _one_thread_fixed_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def random_model(architecture: Qwen3MoeArchitecture) -> nn.Module:
    assert not find_architecture_faults(architecture)
    return randomised(build_qwen3_moe(architecture))


def build_reference(architecture: Qwen3MoeArchitecture, state_dict: dict) -> nn.Module:
    layers = tuple(layer for layer in range(architecture.num_hidden_layers) if architecture.has_experts(layer))
    values = {**asdict(architecture), "rope_scaling": None, "has_qk_norm": True, "sparse_layers": layers}
    configs = []
    for kind in (ReferenceConfig, ReferenceMoEConfig):
        known: dict[str, Any] = {field.name: values[field.name] for field in fields(kind)}
        configs.append(kind(**known))
    reference = build_reference_moe(*configs)
    reference.load_state_dict(state_dict)
    return reference


def build_hugging_face(architecture: Qwen3MoeArchitecture, state_dict: dict) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    values = {name: value for name, value in asdict(architecture).items() if not name.startswith("shared_expert")}
    values["mlp_only_layers"] = list(architecture.mlp_only_layers)
    rope_parameters = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.Qwen3MoeConfig(**values, rope_parameters=rope_parameters, **plain)
    oracle = transformers.Qwen3MoeForCausalLM(config)
    oracle.load_state_dict(as_hugging_face(state_dict))
    return oracle


def as_hugging_face(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names and stacks as Hugging Face has them in memory: gate above up, of all experts."""
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.up_proj"):
            continue
        if name.endswith("experts.gate_proj"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            named["model." + name.replace("gate_proj", "gate_up_proj")] = torch.cat((tensor, up), dim=1)
        elif name == "lm_head.weight":
            named[name] = tensor
        else:
            named["model." + name.replace("mlp.router", "mlp.gate")] = tensor
    return named


def own_gradients(model: nn.Module) -> dict[str, Tensor]:
    return {fqn: cast(Tensor, parameter.grad) for fqn, parameter in model.named_parameters()}


def assert_hugging_face_gradients(model: nn.Module, oracle: nn.Module) -> None:
    actual = as_hugging_face(own_gradients(model))
    errors = {fqn: relative_error(actual[fqn], cast(Tensor, p.grad)) for fqn, p in oracle.named_parameters()}
    assert errors.keys() == actual.keys()
    assert max(errors.values()) <= MODEL_GRADIENT, errors


@pytest.mark.parametrize("name", [*ARCHITECTURES, "shared_expert"])
def test_logits_loss_and_every_gradient_equal_the_reference(name):
    architecture = ARCHITECTURES.get(name, SHARED)
    model = random_model(architecture)
    reference = build_reference(architecture, model.state_dict())
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)
    documents = packed_documents()

    logits_BTV, expected_BTV = model(input_ids_BT, *documents), reference(input_ids_BT, *documents)
    loss, expected_loss = mean_loss(logits_BTV, labels_BT), plain_mean_loss(expected_BTV, labels_BT)
    loss.backward()
    expected_loss.backward()

    assert relative_error(logits_BTV, expected_BTV) <= MODEL_OUTPUT
    assert relative_error(loss, expected_loss) <= FP32_SCALAR
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_loss_and_every_gradient_equal_hugging_face(name):
    architecture = ARCHITECTURES[name]
    model = random_model(architecture)
    oracle = build_hugging_face(architecture, model.state_dict())
    input_ids_BT, labels_BT = random_batch(architecture.vocab_size)

    logits_BTV = model(input_ids_BT)
    expected = oracle(input_ids=input_ids_BT, labels=unshifted(labels_BT))
    loss = mean_loss(logits_BTV, labels_BT)
    loss.backward()
    expected.loss.backward()

    assert relative_error(logits_BTV, expected.logits) <= MODEL_OUTPUT
    assert relative_error(loss, expected.loss) <= FP32_SCALAR
    assert_hugging_face_gradients(model, oracle)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_balance_losses_equal_their_sums_token_by_token(scope):
    architecture = replace(BASE, router_aux_loss_coef=0.7, router_z_loss_coef=0.3, router_aux_loss_scope=scope)
    model = random_model(architecture)
    reference = build_reference(architecture, model.state_dict())
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
    model = random_model(architecture)
    oracle = build_hugging_face(architecture, model.state_dict())
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
    layer, oracle = random_model(SHARED).get_submodule("layers.0.mlp"), modeling.Qwen2MoeSparseMoeBlock(config)
    names = {f"mlp.{fqn}": tensor for fqn, tensor in layer.state_dict().items()}
    oracle.load_state_dict({fqn.removeprefix("model.mlp."): w for fqn, w in as_hugging_face(names).items()})
    x_BTD = torch.randn(2, 9, SHARED.hidden_size)

    y_BTD, expected_BTD = layer(x_BTD), oracle(x_BTD)
    for result in (y_BTD, expected_BTD):
        result.square().sum().backward()

    assert relative_error(y_BTD, expected_BTD) <= MODEL_OUTPUT
    actual = as_hugging_face({f"mlp.{fqn}": tensor for fqn, tensor in own_gradients(layer).items()})
    errors = {fqn: relative_error(actual[f"model.mlp.{fqn}"], p.grad) for fqn, p in oracle.named_parameters()}
    assert max(errors.values()) <= MODEL_GRADIENT, errors
