"""What comparisons with oracles share: random weights, a batch, losses, and our tensors in Hugging Face's form.

The references themselves stand in ``models.reference``, which imports nothing of ours.

Shape legend: B = sequences, T = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.hugging_face.model_config import ConfigFormat, write_config
from torchtrain.losses.cross_entropy import IGNORE_INDEX, token_losses
from torchtrain.testing.compare import relative_error

BATCH, TOKENS = 3, 37


def randomised(model: nn.Module) -> nn.Module:
    """Draw large weights, norms and biases too, so that no part of the model can hide behind a zero or a one.

    Norms are drawn around a scale of one: a scale of two in each would amplify rounding from layer to layer.

    Args:
        model: Ours, with ``offset`` where a norm adds to its weight, or Hugging Face's as it was initialised.
    """
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            is_scale = fqn.endswith("norm.weight")
            owner = model.get_submodule(fqn.rpartition(".")[0])
            has_zero_centre = is_scale and (getattr(owner, "offset", 0.0) == 1.0 or not parameter.any())
            parameter.normal_(mean=1.0 if is_scale else 0.0, std=0.2)
            if has_zero_centre:
                parameter.sub_(1.0)
    return model


def random_batch(vocab_size: int, *, batch: int = BATCH, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Draw ids and labels, a third of which are ignored, as are those of the last tokens."""
    input_ids_BT = torch.randint(vocab_size, (batch, tokens))
    labels_BT = torch.randint(vocab_size, (batch, tokens))
    labels_BT[torch.rand(batch, tokens) < 0.3] = IGNORE_INDEX
    labels_BT[:, -1] = IGNORE_INDEX
    return input_ids_BT, labels_BT


def unshifted(labels_BT: Tensor) -> Tensor:
    """Move labels to where Hugging Face, which shifts them itself, wants them."""
    unshifted_BT = torch.full_like(labels_BT, IGNORE_INDEX)
    unshifted_BT[:, 1:] = labels_BT[:, :-1]
    return unshifted_BT


def mean_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Take the mean of our token losses."""
    return token_losses(logits_BTV, labels_BT).sum() / (labels_BT != IGNORE_INDEX).sum()


def plain_mean_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Compute the same without anything of ours."""
    rows, columns = torch.nonzero(labels_BT != IGNORE_INDEX, as_tuple=True)
    chosen = logits_BTV[rows, columns, labels_BT[rows, columns]]
    return (torch.logsumexp(logits_BTV[rows, columns], dim=-1) - chosen).mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Take every gradient there is, by fqn."""
    return {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}


def gradient_errors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Measure every gradient by ``relative_error``; infinite where only one side has it."""
    names: Iterable[str] = dict.fromkeys([*expected, *actual])
    return {
        fqn: relative_error(actual[fqn], expected[fqn]) if fqn in actual and fqn in expected else float("inf")
        for fqn in names
    }


def build_hugging_face(config_format: ConfigFormat, architecture: Any) -> nn.Module:
    """Build Hugging Face's model of an architecture, initialised as there, with its plainest forward.

    Args:
        config_format: The family's; what it cannot express is refused at export, and ignored here.
        architecture: The family's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    written = write_config(architecture, config_format, dtype="float32")
    config = AutoConfig.for_model(**written)
    return AutoModelForCausalLM.from_config(config, **PLAIN_FORWARD).eval()


PLAIN_FORWARD = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""What Hugging Face should compute with."""


def as_hugging_face(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name and stack our tensors, weights or gradients, as Hugging Face has them in memory: gate above up."""
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
