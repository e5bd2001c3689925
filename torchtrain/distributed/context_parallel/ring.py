"""Attention with keys and values that travel: each rank computes its own queries against the shares that pass by.

The sequence is cut into 2n pieces; rank i of n holds pieces i and 2n - 1 - i. Of the share of rank j, the causal mask
then leaves rank i one of three things, each half of all pairs (the first a little more):

- j = i: plain causal attention, as both pieces stand in sequence order;
- j < i: every query sees the first piece and none the second;
- j > i: the second query piece sees both pieces, the first none.

A share travels to the next rank while it is computed with. In backward the shares travel again, and behind each its
gradient, which every rank on the way adds to.

Shape legend: B = batch, T = tokens of this rank, S = tokens of the whole sequence, N = query heads, K = key/value
heads, H = head dim, C = ranks of the cp axis, 2 = keys and values.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"; Brandon et al. 2023,
"Striped Attention: Faster Ring Attention for Causal Transformers", on the imbalance that the two pieces remove.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from torchtrain.distributed.context_parallel.block_attention import (
    MergedAttention,
    Partial,
    Visible,
    attend_block,
    differentiate_block,
    resolve_visible,
)
from torchtrain.distributed.context_parallel.sequence_layout import SequenceLayout


class RingCore:
    """Attends while keys and values go round the ring.

    Args:
        layout: This rank's share, head-tail.
        group: Ranks of the cp axis.

    Numerics:
        Outputs of blocks and gradients are summed in fp32; gradients of keys and values also travel in it.
    """

    def __init__(self, layout: SequenceLayout, group: dist.ProcessGroup) -> None:
        self._layout = layout
        self._ring = Ring(group)

    def build_mask(self, document_ids_BT: Tensor | None) -> Tensor | None:
        """Order the document ids by rank; pairs are compared block by block, so that no T x S mask ever exists.

        Args:
            document_ids_BT: Those of the whole sequence.

        Returns:
            ``document_ids_CBT``: row j for the tokens of rank j.
        """
        if document_ids_BT is None:
            return None
        return torch.stack([self._layout.of_rank(rank).take(document_ids_BT) for rank in range(self._layout.cp_size)])

    @torch.compiler.disable
    def __call__(self, q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, mask: Tensor | None) -> Tensor:
        """Attend; see ``AttentionCore``.

        Collective: the cp axis.
        """
        q_BNTH, k_BKTH, v_BKTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        return _RingAttention.apply(q_BNTH, k_BKTH, v_BKTH, mask, self._ring).transpose(1, 2)


class Ring:
    """The ranks of a group in a circle."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.rank = dist.get_rank(group)

    def pass_on(self, sent: Tensor) -> Passing:
        """Begin to send a tensor to the next rank and to receive the previous one's, of the same shape.

        Collective: the group.
        """
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        operations = [
            dist.P2POp(dist.isend, sent, group=self.group, group_peer=(self.rank + 1) % self.size),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=(self.rank - 1) % self.size),
        ]
        return Passing(sent, received, dist.batch_isend_irecv(operations))


@dataclass(frozen=True)
class Passing:
    """A tensor on its way; the one that is sent must live until it is through."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """Return what the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class _Block:
    """What the causal mask leaves of this rank's queries and another rank's keys."""

    queries: slice
    keys: slice
    visible: Visible


def _plan_block(source: int, rank: int, num_tokens: int, document_ids_CBT: Tensor | None) -> _Block:
    whole, first, second = slice(None), slice(num_tokens // 2), slice(num_tokens // 2, None)
    if source == rank:
        queries, keys = whole, whole
    elif source < rank:
        queries, keys = whole, first
    else:
        queries, keys = second, whole
    query_ids_BT = None if document_ids_CBT is None else document_ids_CBT[rank, :, queries]
    key_ids_BE = None if document_ids_CBT is None else document_ids_CBT[source, :, keys]
    return _Block(queries, keys, resolve_visible(query_ids_BT, key_ids_BE, is_causal=source == rank))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, document_ids_CBT: Tensor | None, ring: Ring
    ) -> Tensor:
        kv_2BKTH = torch.stack((k_BKTH, v_BKTH))
        merging: MergedAttention | None = None
        passing: Passing | None = None
        for hop in range(ring.size):
            if passing is not None:
                kv_2BKTH = passing.wait()
            passing = ring.pass_on(kv_2BKTH) if hop < ring.size - 1 else None
            block = _plan_block((ring.rank - hop) % ring.size, ring.rank, q_BNTH.shape[2], document_ids_CBT)
            k_BKEH, v_BKEH = kv_2BKTH[:, :, :, block.keys].unbind(0)
            part = attend_block(q_BNTH[:, :, block.queries], k_BKEH, v_BKEH, block.visible)
            if merging is None:
                merging = MergedAttention(part)
            else:
                merging.add(part, block.queries)
        assert merging is not None
        merged = merging.partial
        out_BNTH = merged.out_BNTH.to(q_BNTH.dtype)
        ctx.save_for_backward(q_BNTH, k_BKTH, v_BKTH, out_BNTH, merged.lse_BNT, document_ids_CBT)
        ctx.ring = ring
        return out_BNTH

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q_BNTH, k_BKTH, v_BKTH, out_BNTH, lse_BNT, document_ids_CBT = ctx.saved_tensors
        (grad_BNTH,), ring = grads, ctx.ring
        kv_2BKTH = torch.stack((k_BKTH, v_BKTH))
        grad_q_BNTH = torch.zeros_like(q_BNTH, dtype=torch.float32)
        own_2BKTH = torch.zeros_like(kv_2BKTH, dtype=torch.float32)
        passing: Passing | None = None
        passing_grads: Passing | None = None
        for hop in range(ring.size):
            if passing is not None:
                kv_2BKTH = passing.wait()
            passing = ring.pass_on(kv_2BKTH) if hop < ring.size - 1 else None
            block = _plan_block((ring.rank - hop) % ring.size, ring.rank, q_BNTH.shape[2], document_ids_CBT)
            k_BKEH, v_BKEH = kv_2BKTH[:, :, :, block.keys].unbind(0)
            rows = block.queries
            grad_part_q, grad_k, grad_v = differentiate_block(
                grad_BNTH[:, :, rows],
                q_BNTH[:, :, rows],
                k_BKEH,
                v_BKEH,
                Partial(out_BNTH[:, :, rows], lse_BNT[:, :, rows]),
                block.visible,
            )
            grad_q_BNTH[:, :, rows] += grad_part_q
            if hop == 0:
                _add_grads_(own_2BKTH, block.keys, grad_k, grad_v)
                continue
            # The gradients of a share follow it, one hop behind; the first rank after the owner begins with nothing.
            travelling_2BKTH = torch.zeros_like(own_2BKTH) if passing_grads is None else passing_grads.wait()
            _add_grads_(travelling_2BKTH, block.keys, grad_k, grad_v)
            passing_grads = ring.pass_on(travelling_2BKTH)
        whole_2BKTH = own_2BKTH if passing_grads is None else _bring_home(own_2BKTH, passing_grads)
        grad_k_BKTH, grad_v_BKTH = whole_2BKTH.to(k_BKTH.dtype).unbind(0)
        return grad_q_BNTH.to(q_BNTH.dtype), grad_k_BKTH, grad_v_BKTH, None, None


def _add_grads_(grads_2BKTH: Tensor, keys: slice, grad_k_BKEH: Tensor, grad_v_BKEH: Tensor) -> None:
    grads_2BKTH[0, :, :, keys] += grad_k_BKEH
    grads_2BKTH[1, :, :, keys] += grad_v_BKEH


def _bring_home(own_2BKTH: Tensor, passing: Passing) -> Tensor:
    """Add what the other ranks found for this rank's keys and values, which the last hop brings."""
    return own_2BKTH.add_(passing.wait())
