"""Balance losses weigh a position, not a label."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.distributed.test_trainer_steps import build_step, make_micro_batches
from tests.parity.harness import MODEL
from torchtrain.config.load import load_job
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_TENSOR

SIZES = (
    "model.name=qwen3_moe",
    "model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 36, moe_intermediate_size: 10, "
    "num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, num_experts: 4, "
    "router_aux_loss_coef: %s, router_z_loss_coef: %s}",
    "training.micro_batch_size=4",
    "training.max_grad_norm=null",
)


def router_gradient(coef: float, mask: Callable[[Tensor], Tensor]) -> Tensor:
    job = load_job(None, [*MODEL, *(text % (coef, coef) if "%" in text else text for text in SIZES)])
    model, optimizer, step, _ = build_step(job, None)
    kept: list[Tensor] = []
    weight = model.get_parameter("layers.0.mlp.router.weight")

    def keep_gradient(*_: object) -> None:
        assert weight.grad is not None
        kept.append(weight.grad.clone())

    optimizer.register_step_pre_hook(keep_gradient)
    batches = [replace(batch, labels_BT=mask(batch.labels_BT)) for batch in make_micro_batches(job, 0)[1]]
    step.run(1, batches, sum(batch.num_valid_tokens() for batch in batches))
    return kept[0]


def keep_one_in_eight(labels_BT: Tensor) -> Tensor:
    column = torch.arange(labels_BT.shape[1])
    return labels_BT.masked_fill(column % 8 != 0, IGNORE_INDEX)


def gradients_of_balance_losses() -> tuple[Tensor, Tensor]:
    """With most labels there, and with few."""
    many, few = (
        router_gradient(2.0, mask) - router_gradient(0.0, mask)
        for mask in (lambda labels_BT: labels_BT, keep_one_in_eight)
    )
    return many, few


def test_a_mask_of_labels_leaves_the_weight_of_balance_alone() -> None:
    ((many, few),) = run_ranks(gradients_of_balance_losses, 1)
    assert many.any()
    assert relative_error(few, many) <= FP32_TENSOR
