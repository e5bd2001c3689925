from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama.architecture import PRESETS
from models.llama.model import build_llama
from torchtrain.activation_checkpoint import apply_activation_checkpoint
from torchtrain.config.training import ActivationCheckpointConfig
from torchtrain.losses.cross_entropy import token_losses

ARCHITECTURE = replace(
    PRESETS["debug"], vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, head_dim=8
)
MODES = ["full", "selective_op", "every_nth_block"]


def build(mode: Any, *, every_n_blocks: int = 2):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = ActivationCheckpointConfig(mode=mode, every_n_blocks=every_n_blocks)
    model = build_llama(ARCHITECTURE)
    apply_activation_checkpoint(model, config)
    return model


def run(model, *, has_documents=False):
    torch.manual_seed(1)
    input_ids_BT = torch.randint(50, (2, 8))
    document_ids_BT = torch.arange(8).div(3, rounding_mode="floor").expand(2, 8) if has_documents else None
    loss = token_losses(model(input_ids_BT, None, document_ids_BT), input_ids_BT).sum()
    with OpCounter() as recomputed:
        loss.backward()
    return loss, recomputed.counts


class OpCounter(TorchDispatchMode):
    """Counts ops by name; around a backward it sees recomputed ones too."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("has_documents", [False, True])
def test_losses_and_gradients_are_bit_identical(mode, has_documents):
    plain, checkpointed = build("none"), build(mode)
    plain_loss, _ = run(plain, has_documents=has_documents)
    loss, _ = run(checkpointed, has_documents=has_documents)
    assert torch.equal(loss, plain_loss)
    for fqn, parameter in checkpointed.named_parameters():
        assert_close(parameter.grad, plain.get_parameter(fqn).grad, rtol=0, atol=0, msg=fqn)


@pytest.mark.parametrize("mode", MODES)
def test_parameter_names_stay(mode):
    assert list(build(mode).state_dict()) == list(build("none").state_dict())


@pytest.mark.parametrize(("mode", "blocks_recomputed"), [("none", 0), ("full", 3), ("every_nth_block", 2)])
def test_exactly_the_chosen_blocks_are_recomputed(mode, blocks_recomputed):
    model, calls = build(mode), []
    for index, block in enumerate(model.blocks()):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: calls.append(index))
    run(model)
    assert len(calls) - 3 == blocks_recomputed


def test_selective_recomputes_all_but_matmuls_and_attention():
    (_, none), (_, full), (_, selective) = run(build("none")), run(build("full")), run(build("selective_op"))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert attention in full
    assert attention not in selective
    # Early stop ends a recomputation at the last tensor needed, so down_proj's matmul is never repeated.
    assert full["mm"] - none["mm"] == 3 * 6
    assert selective["mm"] == none["mm"]
    assert selective["silu"] == full["silu"] == 3
    assert "silu" not in none


@pytest.mark.parametrize("mode", ["full", "selective_op"])
def test_fewer_activations_are_kept(mode):
    assert kept_bytes(build(mode)) < 0.7 * kept_bytes(build("none"))


def kept_bytes(model) -> int:
    kept = {}

    def remember(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        logits_BTV = model(torch.arange(64).remainder(50).view(2, 32))
    del logits_BTV
    return sum(size for pointer, size in kept.items() if pointer not in parameters)
