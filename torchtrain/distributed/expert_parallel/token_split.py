"""Tensor parallelism without sequence parallelism: every rank of the tp axis has the same tokens; each sends a share.

Otherwise experts would get each token once per tp rank. Gradients keep to the same rule: whole and equal on every tp
rank outside, of one share inside.

Shape legend: N = tokens, M = tokens of this rank's share, D = hidden size, K = experts a token visits.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.nn.moe import RoutedExperts, TokenDispatcher
from torchtrain.nn.routing import Routing


class SplitTokens:
    """Gives another dispatcher this rank's share of the tokens, and gathers the results. A ``nn.moe.TokenDispatcher``.

    Args:
        inner: What serves the share.
        group: Ranks that have the same tokens.
    """

    def __init__(self, inner: TokenDispatcher, group: dist.ProcessGroup) -> None:
        self.inner = inner
        self._group = group

    def run(self, x_ND: Tensor, routing: Routing, experts: RoutedExperts) -> Tensor:
        """See ``TokenDispatcher``.

        Collective: the group, after the inner dispatcher in forward, also before and after it in backward.
        """
        num_tokens = x_ND.shape[0]
        share = _share(num_tokens, self._group)
        weights_MK = cast(Tensor, _Take.apply(routing.weights_NK, share, self._group))
        mine = Routing(weights_MK, routing.expert_ids_NK[share], routing.num_experts)
        y_MD = self.inner.run(cast(Tensor, _Take.apply(x_ND, share, self._group)), mine, experts)
        return cast(Tensor, _Gather.apply(y_MD, num_tokens, self._group))


def _share(num_tokens: int, group: dist.ProcessGroup) -> slice:
    """This rank's tokens: equally many on each, the last ranks fewer or none."""
    size = -(-num_tokens // group.size())
    start = min(group.rank() * size, num_tokens)
    return slice(start, min(start + size, num_tokens))


def _gather(mine: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    size = -(-num_tokens // group.size())
    padded = torch.cat([mine, mine.new_zeros(size - mine.shape[0], *mine.shape[1:])])
    gathered = mine.new_empty(group.size() * size, *mine.shape[1:])
    dist.all_gather_single(gathered.view(-1), padded.view(-1), group=group)
    # Cut to a tensor of its own: FSDP's hook on what experts return is lost on a view that is changed in place.
    return gathered if len(gathered) == num_tokens else gathered[:num_tokens].clone()


class _Take(torch.autograd.Function):
    """Take this rank's share of what all have; backward gathers the shares of the gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, share: slice, group: dist.ProcessGroup) -> Tensor:
        ctx.num_tokens, ctx.group = whole.shape[0], group
        return whole[share].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return _gather(grads[0], ctx.num_tokens, ctx.group), None, None


class _Gather(torch.autograd.Function):
    """Gather what each rank has; backward takes this rank's share of the gradient, which is the same on all."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.share = _share(num_tokens, group)
        return _gather(mine, num_tokens, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        return grads[0][ctx.share], None, None
