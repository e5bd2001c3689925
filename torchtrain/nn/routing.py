"""Which experts a token visits, and with what weight.

Shape legend: B = sequences, T = tokens of a sequence, N = B * T, D = hidden size, E = experts, K = experts
a token visits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.nn.load_balance import (
    BalanceConfig,
    LoadCounter,
    attach_loss,
    auxiliary_loss,
    count_choices,
    measure_shares,
    step_bias,
    z_loss,
)
from torchtrain.nn.recomputation import keep

_LEAST_TOTAL = 1e-20
"""Far below 1 / E, the least total of the best; far enough above 0 that gradients of its inverse are finite."""


class Routing:
    """The router's verdict on the tokens of one forward.

    Deliberately neither a tuple nor a dataclass: FSDP's ``cast_forward_inputs`` reaches into those, and would round the
    weights.

    Attributes:
        weights_NK: fp32, differentiable; they carry the auxiliary losses, so a dispatcher must use them.
        expert_ids_NK: int64, all different within a token.
        num_experts: Of the whole layer, whatever part of them is here.
    """

    def __init__(self, weights_NK: Tensor, expert_ids_NK: Tensor, num_experts: int) -> None:
        self.weights_NK = weights_NK
        self.expert_ids_NK = expert_ids_NK
        self.num_experts = num_experts


class ExpertChoice(Protocol):
    """How the visited experts are picked; benchmarks install their own."""

    def __call__(self, scores_BTE: Tensor, num_choices: int) -> Tensor:
        """Pick ``expert_ids_BTK``, all different within a token."""
        ...


class BestScores:
    """The experts of the highest scores."""

    def __call__(self, scores_BTE: Tensor, num_choices: int) -> Tensor:
        """See ``ExpertChoice``."""
        return scores_BTE.topk(num_choices, dim=-1).indices


class TakingTurns:
    """Every expert equally often, whatever the scores: for benchmarks that must not depend on the weights."""

    def __call__(self, scores_BTE: Tensor, num_choices: int) -> Tensor:
        """See ``ExpertChoice``."""
        num_sequences, num_tokens, num_experts = scores_BTE.shape
        turns = torch.arange(num_sequences * num_tokens * num_choices, device=scores_BTE.device)
        return (turns % num_experts).view(num_sequences, num_tokens, num_choices)


@dataclass(frozen=True)
class RouterConfig:
    """Sizes and rules of one router."""

    hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    """Weights of a token sum to one."""
    balance: BalanceConfig


class Router(nn.Module):
    """Softmax over all experts, then the best few.

    Source: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2.1, without the noise; softmax first as
        in Qwen Team 2025, "Qwen3 Technical Report".

    Numerics:
        Logits, softmax and weights in fp32 whatever the dtype of the residual stream, also under autocast: in bf16 two
        experts tie too easily.

    Attributes:
        choice: The ``ExpertChoice`` in use; replace it to install another.
        counter: This layer's ``LoadCounter``.
        auxiliary_loss_factor: What auxiliary losses are multiplied by; see ``set_auxiliary_loss_factor``.
        expert_bias: fp32, added to the scores for the choice alone; ``None`` without ``bias_update_rate``.
    """

    expert_bias: Tensor | None

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.choice: ExpertChoice = BestScores()
        self.counter = LoadCounter()
        self.auxiliary_loss_factor = 0.0
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        has_bias = config.balance.bias_update_rate > 0
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if has_bias else None)

    def forward(self, x_BTD: Tensor) -> Routing:
        """Route every token.

        Auxiliary losses and counts belong to training: with gradients switched off there are none.

        Collective: what the counter's hooks are, once per forward with gradients, never in a recomputation.
        """
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        with _full_precision(x_BTD.device.type):
            logits_BTE = cast(Tensor, _LinearIn.apply(x_BTD, self.weight, dtype))
        probabilities_BTE = logits_BTE.softmax(dim=-1)
        expert_ids_BTK = keep(lambda: self._choose(probabilities_BTE.detach()))
        weights_BTK = probabilities_BTE.gather(-1, expert_ids_BTK)
        if self.config.norm_topk_prob:
            # A choice that is not by score, or a bias, may name experts whose probabilities are all rounded to 0.
            weights_BTK = weights_BTK / weights_BTK.sum(dim=-1, keepdim=True).clamp(min=_LEAST_TOTAL)
        if torch.is_grad_enabled():
            weights_BTK = self._attach_losses(weights_BTK, expert_ids_BTK, probabilities_BTE, logits_BTE)
        return Routing(weights_BTK.flatten(0, 1), expert_ids_BTK.flatten(0, 1), self.config.num_experts)

    @torch.no_grad()
    def _choose(self, probabilities_BTE: Tensor) -> Tensor:
        scores_BTE = probabilities_BTE if self.expert_bias is None else probabilities_BTE + self.expert_bias
        return self.choice(scores_BTE, self.config.num_experts_per_tok)

    def _attach_losses(
        self, weights_BTK: Tensor, expert_ids_BTK: Tensor, probabilities_BTE: Tensor, logits_BTE: Tensor
    ) -> Tensor:
        balance = self.config.balance
        shares_BE = keep(lambda: self._count(expert_ids_BTK))
        losses = []
        if balance.aux_loss_coef > 0:
            losses.append(auxiliary_loss(probabilities_BTE, shares_BE, balance.aux_loss_coef))
        if balance.z_loss_coef > 0:
            losses.append(z_loss(logits_BTE, balance.z_loss_coef))
        for loss in losses:
            weights_BTK = attach_loss(weights_BTK, loss, self.auxiliary_loss_factor)
        return weights_BTK

    @torch.no_grad()
    def _count(self, expert_ids_BTK: Tensor) -> Tensor:
        """Count this forward's choices; returns the shares for the auxiliary loss."""
        balance = self.config.balance
        counts_BE = count_choices(expert_ids_BTK, self.config.num_experts)
        self.counter.add(counts_BE.sum(dim=0))
        if balance.aux_loss_coef == 0:
            return counts_BE
        return measure_shares(counts_BE, self.counter, balance.aux_loss_scope, self.config.num_experts_per_tok)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Keep the bias in fp32, whatever dtype the model is stored in, and zero when it gets memory."""
        before = self.expert_bias
        module = super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None:
            self.expert_bias = after if after.dtype == before.dtype else before.to(after.device)
            if before.is_meta and not after.is_meta:
                self.expert_bias.zero_()
        return module

    def extra_repr(self) -> str:
        """Show sizes in ``print(model)``."""
        return f"{self.config.num_experts} experts, {self.config.num_experts_per_tok} a token"


class _LinearIn(torch.autograd.Function):
    """``F.linear`` in a dtype of its own that keeps its operands as they came: casts of bf16 would take twice that."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, weight_ED: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x_BTD, weight_ED)
        ctx.dtype = dtype
        return F.linear(x_BTD.to(dtype), weight_ED.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        x_BTD, weight_ED = ctx.saved_tensors
        (grad_BTE,) = grads
        grad_x_BTD, grad_weight_ED = None, None
        if ctx.needs_input_grad[0]:
            grad_x_BTD = (grad_BTE @ weight_ED.to(ctx.dtype)).to(x_BTD.dtype)
        if ctx.needs_input_grad[1]:
            x_ND = x_BTD.flatten(0, 1).to(ctx.dtype)
            grad_weight_ED = (grad_BTE.flatten(0, 1).T @ x_ND).to(weight_ED.dtype)
        return grad_x_BTD, grad_weight_ED, None


def _full_precision(device_type: str) -> AbstractContextManager[Any]:
    has_autocast = torch.amp.is_autocast_available(device_type)
    return torch.autocast(device_type, enabled=False) if has_autocast else nullcontext()


def routers(model: nn.Module) -> Iterator[tuple[str, Router]]:
    """Yield the fqn and the router of every layer with experts, in order."""
    return ((fqn, module) for fqn, module in model.named_modules() if isinstance(module, Router))


def set_auxiliary_loss_factor(model: nn.Module, factor: float) -> None:
    """Say what auxiliary losses, sums over positions, are multiplied by; before a step's first forward."""
    for _, router in routers(model):
        router.auxiliary_loss_factor = factor


def take_loads(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank counted since the last time, by the router's fqn, and begin again.

    Returns:
        int64 ``counts_E`` for each router, zeros where nothing went forward.
    """
    loads = {}
    for fqn, router in routers(model):
        counts_E = router.counter.take()
        if counts_E is None:
            counts_E = torch.zeros(router.config.num_experts, dtype=torch.int64, device=router.weight.device)
        loads[fqn] = counts_E
    return loads


@torch.no_grad()
def update_expert_biases(model: nn.Module, loads: Mapping[str, Tensor]) -> None:
    """Move every expert bias there is, after the optimizer's step.

    Args:
        model: Its routers are known by fqn.
        loads: What ``take_loads`` returned, summed over all ranks that saw other tokens, so that replicas stay equal.
    """
    for fqn, router in routers(model):
        if router.expert_bias is not None:
            rate = router.config.balance.bias_update_rate
            router.expert_bias.copy_(step_bias(router.expert_bias, loads[fqn], rate))


def force_balanced_routing(model: nn.Module) -> None:
    """Have every router send tokens to the experts in turn."""
    for _, router in routers(model):
        router.choice = TakingTurns()
