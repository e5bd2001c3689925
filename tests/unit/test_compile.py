from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from models.llama.architecture import PRESETS
from models.llama.model import build_llama
from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.compile import apply_compile
from torchtrain.config.training import ActivationCheckpointConfig, CompileConfig
from torchtrain.losses.cross_entropy import token_losses
from torchtrain.testing.compare import relative_error
from torchtrain.testing.tolerances import MODEL_GRADIENT

ARCHITECTURE = replace(
    PRESETS["debug"], vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8
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
