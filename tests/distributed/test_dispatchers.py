"""Every dispatcher against one rank that has all experts: outputs and every gradient, whatever the load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torchtrain.activation_checkpoint import _remembering_contexts
from torchtrain.distributed.expert_parallel.domino import DominoDispatcher
from torchtrain.distributed.expert_parallel.eager import EagerDispatcher
from torchtrain.distributed.expert_parallel.fused import FusedDispatcher
from torchtrain.distributed.expert_parallel.mc2 import MC2Dispatcher
from torchtrain.distributed.expert_parallel.overlap import FINISH, START
from torchtrain.nn.moe import LocalDispatcher, RoutedExperts
from torchtrain.nn.routing import Routing
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import DISPATCHED

DISPATCHERS: dict[str, Callable[..., Any]] = {
    "eager": EagerDispatcher,
    "fused": FusedDispatcher,
    "domino": DominoDispatcher,
    "mc2": MC2Dispatcher,
}
HIDDEN, INTERMEDIATE = 16, 12
Result = dict[str, Tensor]

# Ranks, experts, choices; tokens of each rank; experts that tokens may choose (all where None).
LOADS: dict[str, tuple[int, int, int, tuple[int, ...], tuple[int, ...] | None]] = {
    "two_ranks": (2, 8, 2, (13, 8), None),
    "four_ranks_ragged": (4, 8, 2, (7, 0, 1, 20), None),
    "ep_is_num_experts": (4, 4, 2, (9, 6, 11, 5), None),
    "every_expert_chosen": (2, 4, 4, (6, 9), None),
    "idle_experts": (2, 8, 2, (11, 4), (1, 2, 6)),
    "one_rank_gets_all": (4, 8, 1, (5, 6, 7, 8), (5,)),
    "no_tokens_at_all": (2, 4, 2, (0, 0), None),
}


def make_inputs(load: str) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], RoutedExperts]:
    """Tokens, routing weights, choices and upstream gradients of each rank, and all experts."""
    _, num_experts, num_choices, tokens, allowed = LOADS[load]
    torch.manual_seed(5)
    experts = RoutedExperts(num_experts, HIDDEN, INTERMEDIATE)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    ids = []
    for number in tokens:
        scores = torch.rand(number, num_experts)
        if allowed is not None:
            scores[:, list(allowed)] += 1
        ids.append(scores.topk(num_choices).indices)
    x = [torch.randn(number, HIDDEN) for number in tokens]
    weights = [torch.rand(number, num_choices) for number in tokens]
    return x, weights, ids, [torch.randn(number, HIDDEN) for number in tokens], experts


def run_once(
    dispatcher: Any, experts: RoutedExperts, x: Tensor, weights: Tensor, ids: Tensor, up: Tensor, e: int
) -> Result:
    experts.zero_grad()
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    # As in a model: what is dispatched was computed from something else.
    y = experts(x * 1.0, Routing(weights * 1.0, ids, e), dispatcher)
    y.backward(up)
    gradients = {name: weight.grad.clone() for name, weight in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **gradients}


def dispatch_on_this_rank(load: str) -> dict[str, list[Result]]:
    """Every dispatcher's results, twice."""
    x, weights, ids, upstream, whole = make_inputs(load)
    rank, num_experts = dist.get_rank(), LOADS[load][1]
    share = num_experts // dist.get_world_size()
    local = RoutedExperts(share, HIDDEN, INTERMEDIATE)
    with torch.no_grad():
        for mine, all_of_them in zip(local.parameters(), whole.parameters(), strict=True):
            mine.copy_(all_of_them[rank * share : (rank + 1) * share])
    inputs = (x[rank], weights[rank], ids[rank], upstream[rank], num_experts)
    return {
        name: [run_once(build(dist.group.WORLD, is_exchange_kept=True), local, *inputs) for _ in range(2)]
        for name, build in DISPATCHERS.items()
    }


def expected(load: str) -> Result:
    x, weights, ids, upstream, whole = make_inputs(load)
    return run_once(LocalDispatcher(), whole, *map(torch.cat, (x, weights, ids, upstream)), LOADS[load][1])


@pytest.mark.parametrize("load", LOADS)
def test_every_dispatcher_equals_one_rank_with_all_experts(load: str) -> None:
    by_rank = run_ranks(dispatch_on_this_rank, LOADS[load][0], load)
    reference = expected(load)
    for name in DISPATCHERS:
        for part, value in reference.items():
            pieces = torch.cat([results[name][0][part] for results in by_rank])
            assert relative_error(pieces, value) <= DISPATCHED, (name, part)
        for results in by_rank:
            first, second = results[name]
            assert all(first[part].equal(second[part]) for part in first), f"{name} differs from run to run"


def recompute_on_this_rank(name: str, is_kept: bool) -> tuple[list[Result], Counter[str]]:
    """Results without and with recomputation, and what travelled in the second."""
    x, weights, ids, upstream, _ = make_inputs("two_ranks")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    local = RoutedExperts(4, HIDDEN, INTERMEDIATE)
    for weight in local.parameters():
        torch.nn.init.normal_(weight)
    dispatcher = DISPATCHERS[name](dist.group.WORLD, is_exchange_kept=is_kept)
    inputs = (x[rank], weights[rank], ids[rank], upstream[rank], 8)
    plain = run_once(dispatcher, local, *inputs)
    forward, options = local.forward, {"use_reentrant": False, "context_fn": partial(_remembering_contexts, False)}
    local.forward = partial(checkpoint, forward, **options)
    with Travels() as travels:
        recomputed = run_once(dispatcher, local, *inputs)
    return [plain, recomputed], travels.counts


class Travels(TorchDispatchMode):
    """Counts collectives, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in ("c10d::alltoall_base_", "c10d::send"):
            payload = args[0][0] if isinstance(args[0], list) else args[0]
            self.counts[str(payload.dtype)] += 1
        return func(*args, **(kwargs or {}))


# Rows travel there and back in forward, and again in backward; domino sends two slices of them.
NUM_TRAVELS = {"eager": 4, "fused": 4, "domino": 8, "mc2": 4}


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "exchanged_again"])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_recomputation_exchanges_only_if_asked_and_counts_never_again(name: str, is_kept: bool) -> None:
    again = 0 if is_kept else NUM_TRAVELS[name] // 2
    for (plain, recomputed), counts in run_ranks(recompute_on_this_rank, 2, name, is_kept):
        assert all(plain[part].equal(recomputed[part]) for part in plain)
        # The one exchange of counts is also the one sync of host and device.
        assert counts == {"torch.int64": 1, "torch.float32": NUM_TRAVELS[name] + again}


class Order(TorchDispatchMode):
    """Writes down when exchanges start and finish, and when grouped products run."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "profiler::_record_function_enter_new" and args[0].startswith((START, FINISH)):
            self.events.append(args[0].removeprefix("expert_exchange::"))
        elif name == "torchtrain::grouped_mm" and self.events[-1:] != ["compute"]:
            self.events.append("compute")
        return func(*args, **(kwargs or {}))


def write_down_the_order(name: str) -> tuple[list[str], list[str]]:
    x, weights, ids, upstream, _ = make_inputs("two_ranks")
    rank = dist.get_rank()
    local = RoutedExperts(4, HIDDEN, INTERMEDIATE)
    for weight in local.parameters():
        torch.nn.init.normal_(weight)
    tokens = x[rank].requires_grad_()
    with Order() as forward:
        routing = Routing(weights[rank], ids[rank], 8)
        y = local(tokens * 1.0, routing, DISPATCHERS[name](dist.group.WORLD, is_exchange_kept=True))
    with Order() as backward:
        y.backward(upstream[rank])
    return forward.events, backward.events


def test_domino_computes_one_slice_while_the_other_travels() -> None:
    for forward, backward in run_ranks(write_down_the_order, 2, "domino"):
        assert forward == [
            "start slice 0 to experts",
            "start slice 1 to experts",
            "finish slice 0 to experts",
            "compute",
            "start slice 0 to tokens",
            "finish slice 1 to experts",
            "compute",
            "start slice 1 to tokens",
            "finish slice 0 to tokens",
            "finish slice 1 to tokens",
        ]
        assert backward == [
            "start slice 1 to tokens, back",
            "start slice 0 to tokens, back",
            "finish slice 1 to tokens, back",
            "compute",
            "start slice 1 to experts, back",
            "finish slice 0 to tokens, back",
            "compute",
            "start slice 0 to experts, back",
            "finish slice 1 to experts, back",
            "finish slice 0 to experts, back",
        ]


def test_mc2_computes_its_own_rows_while_those_of_a_peer_travel() -> None:
    for rank, (forward, backward) in enumerate(run_ranks(write_down_the_order, 2, "mc2")):
        peer = f"peer {1 - rank}"
        assert forward == [
            f"start {peer} to experts",
            "compute",
            f"finish {peer} to experts",
            "compute",
            f"start {peer} to tokens",
            f"finish {peer} to tokens",
        ]
        assert backward == [
            f"start {peer} to tokens, back",
            f"finish {peer} to tokens, back",
            "compute",
            f"start {peer} to experts, back",
            "compute",
            f"finish {peer} to experts, back",
        ]
