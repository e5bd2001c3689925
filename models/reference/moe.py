"""A decoder with experts in the plainest torch that computes it: one token, one expert at a time.

Written for reading, not for speed; shares no line with what it judges. The dense parts are those of ``dense``.

Shape legend: B = sequences, T = tokens, D = hidden size, E = experts, F = an expert's intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.reference.dense import ReferenceConfig, ReferenceDecoder, ReferenceFeedForward


@dataclass(frozen=True)
class ReferenceMoEConfig:
    """What the layers with experts are; names are Hugging Face's where it has one."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[int, ...]
    """The layers that have experts."""


class ReferenceExperts(nn.Module):
    """The weights of all experts."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.zeros(num_experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(torch.zeros(num_experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(num_experts, hidden_size, intermediate_size))

    def one(self, expert: int, x_D: Tensor) -> Tensor:
        """Put one token through one expert."""
        gate_F = self.gate_proj[expert] @ x_D
        return self.down_proj[expert] @ (gate_F / (1 + torch.exp(-gate_F)) * (self.up_proj[expert] @ x_D))


class ReferenceRouter(nn.Module):
    """The weights of the router."""

    def __init__(self, num_experts: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))


class ReferenceMoE(nn.Module):
    """Route and compute token by token, and remember what balance losses are made of."""

    def __init__(self, hidden_size: int, config: ReferenceMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = ReferenceRouter(config.num_experts, hidden_size)
        self.experts = ReferenceExperts(config.num_experts, hidden_size, config.moe_intermediate_size)
        if config.shared_expert_intermediate_size:
            self.shared_expert = ReferenceFeedForward(hidden_size, config.shared_expert_intermediate_size)
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)
        self.logits: list[list[Tensor]] = []
        """Of the last forward: per sequence, per token, over experts."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return ``y_BTD``."""
        self.logits = [[self.router.weight @ x_D for x_D in x_TD] for x_TD in x_BTD]
        rows = []
        for x_TD, logits in zip(x_BTD, self.logits, strict=True):
            rows.append(torch.stack([self._one_token(x_D, z_E) for x_D, z_E in zip(x_TD, logits, strict=True)]))
        return torch.stack(rows)

    def _one_token(self, x_D: Tensor, logits_E: Tensor) -> Tensor:
        probabilities_E = probabilities(logits_E)
        chosen = best(probabilities_E, self.config.num_experts_per_tok)
        total = sum(probabilities_E[expert] for expert in chosen) if self.config.norm_topk_prob else 1.0
        y_D = torch.zeros_like(x_D)
        for expert in chosen:
            y_D = y_D + probabilities_E[expert] / total * self.experts.one(expert, x_D)
        if self.config.shared_expert_intermediate_size:
            y_D = y_D + torch.sigmoid(self.shared_expert_gate(x_D)) * self.shared_expert(x_D)
        return y_D

    def auxiliary_loss(self, *, is_per_sequence: bool) -> Tensor:
        """Sum over tokens of E * sum_i (share of the tokens that chose i) * (probability of i)."""
        every_token = [logits_E for logits in self.logits for logits_E in logits]
        groups = self.logits if is_per_sequence else [every_token]
        loss = torch.zeros((), dtype=every_token[0].dtype)
        for group in groups:
            chosen = [best(probabilities(logits_E), self.config.num_experts_per_tok) for logits_E in group]
            for expert in range(self.config.num_experts):
                share = sum(expert in experts for experts in chosen) / len(group)
                for logits_E in group:
                    loss = loss + self.config.num_experts * share * probabilities(logits_E)[expert]
        return loss

    def z_loss(self) -> Tensor:
        """Sum over tokens of log(sum(exp(logits)))^2."""
        return torch.stack([torch.log(torch.exp(z_E).sum()) ** 2 for logits in self.logits for z_E in logits]).sum()


def build_reference_moe(dense: ReferenceConfig, config: ReferenceMoEConfig) -> ReferenceDecoder:
    """Build a dense decoder, then give some of its layers experts."""
    decoder = ReferenceDecoder(dense)
    for index in config.sparse_layers:
        decoder.layers[index].mlp = ReferenceMoE(dense.hidden_size, config)
    return decoder


def probabilities(logits_E: Tensor) -> Tensor:
    """Softmax, written out."""
    exponentials_E = torch.exp(logits_E - logits_E.max())
    return exponentials_E / exponentials_E.sum()


def best(scores_E: Tensor, count: int) -> list[int]:
    """Name the experts of the highest scores."""
    return sorted(range(len(scores_E)), key=scores_E.tolist().__getitem__, reverse=True)[:count]
