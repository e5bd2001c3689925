from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.llama.architecture import PRESETS
from models.llama.model import build_llama
from models.qwen3_moe.architecture import PRESETS as MOE_PRESETS
from models.qwen3_moe.model import build_qwen3_moe, init_rule
from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.compile import apply_compile
from torchtrain.config.training import ActivationCheckpointConfig, CompileConfig
from torchtrain.distributed.materialize import initialize_parameters
from torchtrain.losses.cross_entropy import token_losses
from torchtrain.nn.routing import set_auxiliary_loss_factor, take_loads
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_GRADIENT

ARCHITECTURE = replace(
    PRESETS["debug"], vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8
)
WITH_EXPERTS = replace(
    MOE_PRESETS["debug"],
    vocab_size=50,
    hidden_size=32,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    head_dim=8,
    router_aux_loss_coef=0.1,
)


def build():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return build_llama(ARCHITECTURE)


def run(model):
    torch.manual_seed(1)
    input_ids_BT = torch.randint(50, (2, 8))
    loss = token_losses(model(input_ids_BT), input_ids_BT).sum()
    loss.backward()
    return loss


def test_disabled_leaves_the_model_alone():
    model = build()
    apply_compile(model, CompileConfig())
    assert all("forward" not in vars(block) for block in model.blocks())


@pytest.mark.parametrize("mode", ["none", "full", "selective_op"])
def test_compiled_blocks_share_one_graph_and_keep_losses_and_gradients(mode):
    torch._dynamo.reset()
    counter: Any = CompileCounterWithBackend("aot_eager")
    plain, compiled = build(), build()
    apply_activation_checkpoint(compiled, ActivationCheckpointConfig(mode=mode))
    apply_compile(compiled, CompileConfig(enabled=True, fullgraph=True, backend=counter))

    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert relative_error(run(compiled), run(plain)) <= MODEL_GRADIENT
    for fqn, parameter in compiled.named_parameters():
        gradient, expected = parameter.grad, plain.get_parameter(fqn).grad
        assert gradient is not None
        assert expected is not None
        assert relative_error(gradient, expected) <= MODEL_GRADIENT, fqn
    assert counter.frame_count == 1


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_compiled_block_with_experts_keeps_losses_gradients_and_loads(mode):
    """Not in one graph: what is kept for a recomputation breaks it."""
    torch._dynamo.reset()
    torch.set_num_threads(1)
    plain, compiled = build_qwen3_moe(WITH_EXPERTS), build_qwen3_moe(WITH_EXPERTS)
    initialize_parameters(plain, lambda fqn: init_rule(WITH_EXPERTS, fqn), seed=0)
    compiled.load_state_dict(plain.state_dict())
    apply_activation_checkpoint(compiled, ActivationCheckpointConfig(mode=mode))
    apply_compile(compiled, CompileConfig(enabled=True, backend="aot_eager"))
    # As in training, where every step has its own number of tokens; compile makes a variable of what it sees change.
    for factor in (0.1, 0.3):
        for model in (plain, compiled):
            set_auxiliary_loss_factor(model, factor)
        assert relative_error(run(compiled), run(plain)) <= MODEL_GRADIENT
        for fqn, parameter in compiled.named_parameters():
            assert relative_error(parameter.grad, plain.get_parameter(fqn).grad) <= MODEL_GRADIENT, fqn
        expected, actual = take_loads(plain), take_loads(compiled)
        assert all(torch.equal(actual[fqn], expected[fqn]) for fqn in expected)
