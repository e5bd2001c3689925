"""How often a layer with experts makes the host wait for the device: once in forward, for sizes of buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.distributed.test_dispatchers import DISPATCHERS
from torchtrain.activation_checkpoint import _remembering_contexts
from torchtrain.distributed.expert_parallel.token_split import SplitTokens
from torchtrain.nn.feed_forward import FeedForward
from torchtrain.nn.load_balance import BalanceConfig
from torchtrain.nn.moe import LocalDispatcher, MoE, RoutedExperts
from torchtrain.nn.routing import Router, RouterConfig
from torchtrain.testing.host_syncs import HostSyncs
from torchtrain.testing.ranks import run_ranks

HIDDEN, NUM_EXPERTS = 16, 8
Counts = dict[str, tuple[list[str], list[str]]]


class OperatorsThatWait(TorchDispatchMode):
    """Notes operators that read a value on the host, whoever calls them, autograd's own nodes too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().split(".")[0] in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def build_layer(dispatcher: Any, num_local: int, intermediate_size: int) -> MoE:
    """All that a layer can have: both losses, counts for a bias, a shared expert with its gate."""
    torch.manual_seed(0)
    balance = BalanceConfig(aux_loss_coef=0.1, z_loss_coef=0.1, bias_update_rate=0.1)
    moe = MoE(
        router=Router(RouterConfig(HIDDEN, NUM_EXPERTS, 2, True, balance)),
        experts=RoutedExperts(num_local, HIDDEN, intermediate_size),
        shared_expert=FeedForward(HIDDEN, 12),
        shared_expert_gate=torch.nn.Linear(HIDDEN, 1, bias=False),
    )
    for weight in moe.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    moe.dispatcher = dispatcher
    return moe


def count_one(moe: MoE, num_tokens: int, *, is_recomputed: bool = False) -> tuple[list[str], list[str]]:
    """Waits of forward and of backward."""
    x_BTD = torch.randn(2, num_tokens, HIDDEN).requires_grad_()
    run = moe.forward
    if is_recomputed:
        run = partial(checkpoint, run, use_reentrant=False, context_fn=partial(_remembering_contexts, False))
    with HostSyncs() as forward:
        y_BTD = run(x_BTD * 1.0)
    with OperatorsThatWait() as backward:
        y_BTD.backward(torch.ones_like(y_BTD))
    return forward.seen, backward.seen


def count_all() -> Counts:
    """Every way through a layer, in one go: ranks are dear to start."""
    world, num_tokens = dist.group.WORLD, 5 + dist.get_rank()
    counts = {"all experts here": count_one(build_layer(LocalDispatcher(), NUM_EXPERTS, 12), num_tokens)}
    for name, build in DISPATCHERS.items():
        counts[name] = count_one(build_layer(build(world, is_exchange_kept=True), NUM_EXPERTS // 2, 12), num_tokens)
        for is_kept in (True, False):
            layer = build_layer(build(world, is_exchange_kept=is_kept), NUM_EXPERTS // 2, 12)
            counts[f"{name} recomputed, kept {is_kept}"] = count_one(layer, num_tokens, is_recomputed=True)
    split = SplitTokens(DISPATCHERS["eager"](world, is_exchange_kept=True), world)
    counts["tokens split over tp"] = count_one(build_layer(split, NUM_EXPERTS // 2, 12), num_tokens=5)
    return counts


def test_a_layer_waits_once_for_the_sizes_of_its_buffers_and_never_in_backward() -> None:
    for counts in run_ranks(count_all, 2):
        # Nothing travels: no size depends on what the router chose.
        assert counts.pop("all experts here") == ([], [])
        # The counts of rows to send and to receive, in one copy. Backward and a recomputation have them already.
        assert counts == dict.fromkeys(counts, (["cpu"], []))
        assert counts.keys() >= {*DISPATCHERS, "tokens split over tp"}


def test_a_read_in_backward_is_seen() -> None:
    y = torch.ones(3, requires_grad=True) * 1.0
    y.register_hook(lambda grad: grad * grad.sum().item())
    with OperatorsThatWait() as operators:
        y.sum().backward()
    assert operators.seen == ["aten::_local_scalar_dense"]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x.sum().item(), ["item"]),
        (lambda x: x[x > 0], ["__getitem__"]),
        (lambda x: bool((x > 0).any()), ["__bool__"]),
        (lambda x: torch.arange(3).to(x.device), ["to"]),
        (lambda x: x.cpu().tolist(), ["cpu"]),
        (lambda x: torch.arange(3, device=x.device).tolist(), ["tolist"]),
        (lambda x: torch.arange(3).cumsum(0).tolist(), []),
        (lambda x: x.new_ones(3).repeat_interleave(torch.ones(3, dtype=torch.long, device=x.device)),
         ["repeat_interleave"]),
        (lambda x: (x.shape, x.dtype, len(x), x[None].to(torch.bfloat16).mT), []),
    ],
)  # fmt: skip
def test_the_count_sees_what_waits_and_nothing_else(call: Any, expected: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    with HostSyncs() as syncs:
        call(x)
    assert syncs.seen == expected
