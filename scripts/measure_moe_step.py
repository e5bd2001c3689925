"""Time a model with experts against itself with a plain loop over experts, forward and backward on one device.

    python scripts/measure_moe_step.py [--rounds 10] [--tokens 2048]

The loop is what one writes first: for each expert, find its tokens, compute, add up. Rounds alternate and the one that
goes first changes; the ratio is the median over rounds. Losses and gradients are compared too.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.qwen3_moe.spec import SPEC
from models.registry import resolve_architecture
from torchtrain.nn.moe import LocalDispatcher, MoE, RoutedExperts, TokenDispatcher
from torchtrain.nn.routing import Routing


class LoopDispatcher:
    """A ``TokenDispatcher`` that visits one expert after the other; a host sync each."""

    def run(self, x_ND: Tensor, routing: Routing, experts: RoutedExperts) -> Tensor:
        """See ``TokenDispatcher``."""
        y_ND = torch.zeros_like(x_ND)
        for expert in range(routing.num_experts):
            tokens_R, visits_R = torch.where(routing.expert_ids_NK == expert)
            if len(tokens_R) == 0:
                continue
            x_RD = x_ND[tokens_R]
            hidden_RF = F.silu(x_RD @ experts.gate_proj[expert].T) * (x_RD @ experts.up_proj[expert].T)
            weighted_RD = (hidden_RF @ experts.down_proj[expert].T) * routing.weights_NK[tokens_R, visits_R, None]
            y_ND = y_ND.index_add(0, tokens_R, weighted_RD.to(y_ND.dtype))
        return y_ND


def step(model: nn.Module, ids_BT: Tensor, dispatcher: TokenDispatcher) -> tuple[float, float]:
    """Run forward and backward; returns seconds and the loss."""
    for module in model.modules():
        if isinstance(module, MoE):
            module.dispatcher = dispatcher
    model.zero_grad(set_to_none=True)
    started = time.perf_counter()
    loss = model(ids_BT, labels_BT=ids_BT).mean()
    loss.backward()
    return time.perf_counter() - started, loss.item()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Time grouped experts against a loop over experts.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8)
    arguments = parser.parse_args(argv)
    torch.manual_seed(0)
    sizes = {"num_experts": arguments.experts}
    model = SPEC.build(resolve_architecture("qwen3_moe", "debug", sizes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    ids_BT = torch.randint(4096, (arguments.tokens // 256, 256))
    ways: dict[str, TokenDispatcher] = {"grouped": LocalDispatcher(), "loop": LoopDispatcher()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {name: step(model, ids_BT, way)[1] for name, way in ways.items()}
    for round_index in range(arguments.rounds):
        for name in list(ways)[:: 1 if round_index % 2 else -1]:
            seconds[name].append(step(model, ids_BT, ways[name])[0])
    ratios = [loop / grouped for grouped, loop in zip(seconds["grouped"], seconds["loop"], strict=True)]
    for name in ways:
        print(f"{name}: {median(seconds[name]) * 1e3:.0f} ms, loss {losses[name]:.6f}")
    print(f"loop over grouped: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
