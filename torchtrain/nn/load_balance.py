"""Keep experts evenly loaded: auxiliary losses, the bias that needs none, and what is measured of the load.

Plain functions of probabilities and counts. Who counts together is decided by whoever knows the ranks: ``LoadCounter``
has a place for it.

Shape legend: B = sequences, T = tokens of a sequence, K = experts a token visits, E = experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

Scope = Literal["sequence", "batch"]


@dataclass(frozen=True)
class BalanceConfig:
    """How one layer's load is balanced."""

    aux_loss_coef: float = 0.0
    """Of this layer."""
    aux_loss_scope: Scope = "sequence"
    """``sequence``: each sequence for itself, the same whatever goes forward together; ``batch``: all that does."""
    z_loss_coef: float = 0.0
    """Of this layer."""
    bias_update_rate: float = 0.0
    """What ``expert_bias`` moves by in a step; 0: there is none."""


def _keep(counts: Tensor) -> Tensor:
    return counts


class LoadCounter:
    """Counts the tokens that chose each expert, for losses now and for the bias and metrics after the step.

    Attributes:
        sum_over_sequence: Adds ``counts_BE`` up over the ranks that hold other tokens of the same sequences; replace it
            where there are any. Returns a new tensor.
        sum_over_batch: Adds ``counts_E`` up over all ranks that go forward together; likewise.
    """

    def __init__(self) -> None:
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _keep
        self.sum_over_batch: Callable[[Tensor], Tensor] = _keep
        self._total_E: Tensor | None = None

    def add(self, counts_E: Tensor) -> None:
        """Count one forward of this rank."""
        self._total_E = counts_E if self._total_E is None else self._total_E + counts_E

    def take(self) -> Tensor | None:
        """Return what this rank counted since the last time, int64, and begin again; None for nothing."""
        total_E, self._total_E = self._total_E, None
        return total_E


def count_choices(expert_ids_BTK: Tensor, num_experts: int) -> Tensor:
    """Count how often each sequence's tokens chose each expert; int64 ``counts_BE``."""
    num_sequences = expert_ids_BTK.shape[0]
    ids_BR = expert_ids_BTK.flatten(1)
    starts_B1 = torch.arange(num_sequences, device=ids_BR.device)[:, None] * num_experts
    # One dim: the form of scatter_add that has a deterministic kernel on every device.
    counts = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=ids_BR.device)
    places = (ids_BR + starts_B1).flatten()
    return counts.scatter_add_(0, places, torch.ones_like(places)).view(num_sequences, num_experts)


def measure_shares(counts_BE: Tensor, counter: LoadCounter, scope: Scope, num_choices: int) -> Tensor:
    """Divide counts by tokens: the share of the tokens in scope that chose each expert.

    Returns:
        fp32 ``shares_BE``, each row summing to ``num_choices``; ``(1, E)`` for scope ``batch``. Zero without tokens.

    Collective: ``sum_over_sequence`` or ``sum_over_batch`` of the counter.
    """
    if scope == "batch":
        counts_BE = counter.sum_over_batch(counts_BE.sum(dim=0))[None]
    else:
        counts_BE = counter.sum_over_sequence(counts_BE)
    num_tokens_B1 = counts_BE.sum(dim=-1, keepdim=True).clamp(min=1) / num_choices
    return counts_BE / num_tokens_B1


def auxiliary_loss(probabilities_BTE: Tensor, shares_BE: Tensor, coef: float) -> Tensor:
    """Sum over tokens of ``coef * E * sum_i share_i * probability_ti``.

    Summed, not averaged: the trainer's factor makes it a mean over all that go forward in a step. Balanced routing
    costs ``coef * num_choices`` a token.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6, with Hugging Face's shares, which sum to the
        number of choices; per sequence: DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20.
    """
    totals_BE = probabilities_BTE.sum(dim=1)
    return coef * probabilities_BTE.shape[-1] * (shares_BE.detach() * totals_BE).sum()


def z_loss(logits_BTE: Tensor, coef: float) -> Tensor:
    """Sum over tokens of ``coef * logsumexp(logits)^2``, which keeps the router's logits small.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return coef * logits_BTE.logsumexp(dim=-1).square().sum()


def attach_loss(carrier: Tensor, loss: Tensor, factor: float) -> Tensor:
    """Return ``carrier`` such that its backward is also that of ``factor * loss``.

    Args:
        carrier: Any tensor that the model's loss depends on.
        loss: A scalar.
        factor: One over the positions of the whole step, times the loss scale.
    """
    # The factor stays outside: it changes from step to step, and torch 2.13 fails to compile a backward that reads it.
    return cast(Tensor, _AttachedLoss.apply(carrier, loss * factor))


class _AttachedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return grads[0], grads[0].new_ones((), dtype=ctx.loss_dtype)


def step_bias(bias_E: Tensor, counts_E: Tensor, rate: float) -> Tensor:
    """Move each expert's bias by ``rate`` towards an even load; returns the new bias.

    Args:
        bias_E: Added to the router's scores for the choice alone.
        counts_E: Tokens that chose each expert in this step, over all ranks and micro-batches.
        rate: Size of the move.

    Source: Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
    """
    error_E = counts_E.float().mean() - counts_E
    return bias_E + rate * error_E.sign()


@dataclass(frozen=True)
class LoadReport:
    """How evenly one layer's experts were used in a step."""

    shares: tuple[float, ...]
    """Of all choices, per expert; they sum to 1."""
    entropy: float
    """Of the shares, relative to its maximum: 1 is balanced, 0 is one expert for all."""
    max_over_mean: float
    """The busiest expert's tokens over the mean: what the slowest rank waits for."""


def report_load(counts_E: Tensor) -> LoadReport:
    """Describe one layer's counts, summed over all ranks. Reads the tensor on the host."""
    shares_E = counts_E.double().cpu() / counts_E.sum().clamp(min=1).cpu()
    num_experts = counts_E.shape[0]
    highest = math.log(num_experts)
    entropy = float(torch.special.entr(shares_E).sum()) / highest if num_experts > 1 else 1.0
    return LoadReport(tuple(shares_E.tolist()), entropy, float(shares_E.max()) * num_experts)
