from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from models.llama.architecture import PRESETS, find_architecture_faults
from models.llama.model import build_llama, flops_per_token, init_rule
from torchtrain.distributed.materialize import initialize_parameters
from torchtrain.nn.init import Constant, Normal

TINY = replace(PRESETS["debug"], vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=4)
TIED = replace(TINY, tie_word_embeddings=True)
IDS_BT = torch.arange(10).view(2, 5)


def initialised(architecture, seed=0):
    model = build_llama(architecture)
    initialize_parameters(model, lambda fqn: init_rule(architecture, fqn), seed)
    return model


@pytest.mark.parametrize(
    ("preset", "num_parameters"),
    [
        ("debug", 3_196_608),
        # The counts that Hugging Face shows for the published checkpoints.
        ("1b", 1_235_814_400),
        ("3b", 3_212_749_824),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        ("405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_parameter_counts(preset, num_parameters):
    architecture = PRESETS[preset]
    with torch.device("meta"):
        model = build_llama(architecture)
    assert not find_architecture_faults(architecture)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters
    linear_layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert architecture.num_matmul_parameters == sum(layer.weight.numel() for layer in linear_layers)


def test_flops_of_the_8b_are_near_six_per_parameter():
    assert flops_per_token(PRESETS["8b"], seq_len=1) == pytest.approx(6 * 7.505e9, rel=1e-3)
    per_token_of_context = flops_per_token(PRESETS["8b"], seq_len=2) - flops_per_token(PRESETS["8b"], seq_len=1)
    assert per_token_of_context == 6 * 32 * 4096


def test_parameters_carry_hugging_face_names():
    names = {fqn for fqn, _ in build_llama(TINY).named_parameters()}
    layer_names = {
        f"layers.{index}.{part}.weight"
        for index in range(2)
        for part in (
            *(f"self_attn.{projection}_proj" for projection in "qkvo"),
            *(f"mlp.{projection}_proj" for projection in ("gate", "up", "down")),
            "input_layernorm",
            "post_attention_layernorm",
        )
    }
    assert names == {"embed_tokens.weight", "norm.weight", "lm_head.weight", *layer_names}
    assert not list(build_llama(TINY).buffers())


def test_weights_do_not_depend_on_the_order_in_which_layers_are_built():
    whole = initialised(TINY)
    last_stage = build_llama(TINY)
    last_stage.embed_tokens = None
    del last_stage.layers["0"]
    initialize_parameters(last_stage, lambda fqn: init_rule(TINY, fqn), 0)
    for fqn, parameter in last_stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(fqn))


def test_residual_projections_start_smaller_by_depth():
    assert init_rule(TINY, "layers.1.self_attn.q_proj.weight") == Normal(0.02)
    assert init_rule(TINY, "embed_tokens.weight") == Normal(0.02)
    assert init_rule(TINY, "layers.1.self_attn.o_proj.weight") == Normal(0.01)
    assert init_rule(TINY, "layers.1.mlp.down_proj.weight") == Normal(0.01)
    assert init_rule(TINY, "layers.1.self_attn.q_proj.bias") == Constant(0.0)
    for norm in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"):
        assert init_rule(TINY, f"{norm}.weight") == Constant(1.0)


def test_tied_weights_are_one_parameter():
    tied, untied = build_llama(TIED), build_llama(TINY)
    assert tied.get_parameter("lm_head.weight") is tied.get_parameter("embed_tokens.weight")
    assert untied.get_parameter("lm_head.weight") is not untied.get_parameter("embed_tokens.weight")
    assert "lm_head.weight" not in dict(tied.named_parameters())


def test_two_stages_in_a_row_equal_the_whole_model():
    whole, first, last = (initialised(TINY) for _ in range(3))
    first.norm = first.lm_head = last.embed_tokens = None
    del first.layers["1"], last.layers["0"]
    positions_BT = torch.tensor([[0, 1, 2, 0, 1]]).expand(2, 5)
    document_ids_BT = torch.tensor([[0, 0, 0, 1, 1]], dtype=torch.int32).expand(2, 5)
    x_BTD = first(IDS_BT, positions_BT, document_ids_BT)
    assert torch.equal(last(x_BTD, positions_BT, document_ids_BT), whole(IDS_BT, positions_BT, document_ids_BT))


def test_a_stage_without_blocks_only_embeds():
    stage = initialised(TINY)
    stage.layers, stage.norm, stage.lm_head = nn.ModuleDict(), None, None
    assert torch.equal(stage(IDS_BT), stage.get_parameter("embed_tokens.weight")[IDS_BT])


def test_counting_positions_are_the_default():
    model = initialised(TINY)
    assert torch.equal(model(IDS_BT), model(IDS_BT, torch.arange(5).expand(2, 5)))


def test_a_meta_model_runs_its_forward():
    with torch.device("meta"):
        model = build_llama(TINY)
    assert model(IDS_BT.to("meta"), None, torch.zeros(2, 5, device="meta")).shape == (2, 5, 50)


def test_every_parameter_learns_under_bf16_autocast():
    model = initialised(TINY)
    seen = []
    model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(IDS_BT)
    gradients = torch.autograd.grad(logits_BTV.float().logsumexp(-1).sum(), list(model.parameters()))
    assert seen == [torch.bfloat16]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
