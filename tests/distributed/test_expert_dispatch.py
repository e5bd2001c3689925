"""Tokens on their way to experts on other ranks: ranks without tokens, experts without tokens, ragged shares."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.distributed.expert_parallel.eager import EagerDispatcher
from torchtrain.distributed.expert_parallel.token_split import SplitTokens
from torchtrain.nn.moe import LocalDispatcher, RoutedExperts, TokenDispatcher
from torchtrain.nn.routing import Routing
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_TENSOR

NUM_EXPERTS, NUM_VISITED, HIDDEN = 8, 2, 8


def draw(num_tokens: int, num_chosen: int) -> tuple[RoutedExperts, Tensor, Tensor, Tensor]:
    """Experts, and tokens that visit only the first few of them."""
    torch.manual_seed(0)
    experts = RoutedExperts(NUM_EXPERTS, HIDDEN, 12)
    for parameter in experts.parameters():
        nn.init.normal_(parameter)
    ids_NK = torch.rand(num_tokens, num_chosen).topk(NUM_VISITED).indices
    return experts, torch.randn(num_tokens, HIDDEN), torch.rand(num_tokens, NUM_VISITED), ids_NK


def run_layer(
    experts: RoutedExperts, dispatcher: TokenDispatcher, x_ND: Tensor, weights_NK: Tensor, ids_NK: Tensor
) -> list[Tensor]:
    """Output, and gradients of tokens and weights."""
    x_ND, weights_NK = x_ND.clone().requires_grad_(), weights_NK.clone().requires_grad_()
    y_ND = experts(x_ND, Routing(weights_NK, ids_NK, NUM_EXPERTS), dispatcher)
    y_ND.square().sum().backward()
    assert x_ND.grad is not None
    assert weights_NK.grad is not None
    return [y_ND.detach(), x_ND.grad, weights_NK.grad]


def take_own(experts: RoutedExperts) -> RoutedExperts:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = RoutedExperts(NUM_EXPERTS // size, HIDDEN, 12)
    for mine, whole in zip(own.parameters(), experts.parameters(), strict=True):
        mine.data.copy_(whole.data.chunk(size)[rank])
    return own


def errors_of_uneven_tokens(lengths: list[int], num_chosen: int) -> list[float]:
    """Each rank its tokens; results and gradients against all tokens on one rank."""
    rank = dist.get_rank()
    experts, *tokens = draw(sum(lengths), num_chosen)
    expected = run_layer(experts, LocalDispatcher(), *tokens)
    mine = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    own = take_own(experts)
    dispatcher = EagerDispatcher(dist.group.WORLD, is_exchange_kept=True)
    actual = run_layer(own, dispatcher, *(tensor[mine] for tensor in tokens))
    pairs = [(ours, theirs[mine]) for ours, theirs in zip(actual, expected, strict=True)]
    return [relative_error(ours, theirs) for ours, theirs in [*pairs, *gradients_of(own, experts)] if ours.numel()]


def gradients_of(own: RoutedExperts, whole: RoutedExperts) -> list[tuple[Tensor, Tensor]]:
    """This rank's experts' gradients, and the same of one rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = zip(own.parameters(), whole.parameters(), strict=True)
    return [(mine.grad, theirs.grad.chunk(size)[rank]) for mine, theirs in pairs]


@pytest.mark.parametrize("lengths", [[5, 0, 3, 9], [0, 0, 0, 4], [0, 0, 0, 0]])
@pytest.mark.parametrize("num_chosen", [NUM_EXPERTS, 3])
def test_ranks_and_experts_without_tokens_take_part(lengths: list[int], num_chosen: int) -> None:
    for errors in run_ranks(errors_of_uneven_tokens, 4, lengths, num_chosen):
        assert max(errors, default=0.0) <= FP32_TENSOR


def errors_of_shared_tokens(num_tokens: int) -> list[float]:
    """All ranks the same tokens, each sends a share."""
    experts, *tokens = draw(num_tokens, NUM_EXPERTS)
    expected = run_layer(experts, LocalDispatcher(), *tokens)
    own = take_own(experts)
    dispatcher = EagerDispatcher(dist.group.WORLD, is_exchange_kept=True)
    actual = run_layer(own, SplitTokens(dispatcher, dist.group.WORLD), *tokens)
    pairs = [*zip(actual, expected, strict=True), *gradients_of(own, experts)]
    return [relative_error(ours, theirs) for ours, theirs in pairs]


@pytest.mark.parametrize("num_tokens", [8, 5, 1])
def test_tokens_that_all_ranks_have_are_sent_once(num_tokens: int) -> None:
    for errors in run_ranks(errors_of_shared_tokens, 4, num_tokens):
        assert max(errors) <= FP32_TENSOR
