"""What context parallelism must move in one step, in closed form, beside FSDP's ``comm_volume``. No torch.

Symbols: C ranks of the cp axis; b bytes of an element in the compute dtype; n = tokens of a micro-batch on one rank =
micro_batch_size x seq_len / C; N, K query and key/value heads of one rank (after tensor parallelism), H the head dim;
K' = K where C divides it, else the least common multiple of K and C: key/value heads as Ulysses sends them.

Per layer and micro-batch, on each rank (payloads, as ``collective_ops`` defines them):

==========  ===================  =====================  ==============================  =====
mode        collective           phase                  each carries                    times
==========  ===================  =====================  ==============================  =====
ulysses     all-to-all           forward and backward   b n H (N + 2 K')                1
ulysses     all-to-all           forward and backward   b n H N                         1
allgather   all-gather           forward                b n H 2 K C                     1
allgather   reduce-scatter       backward               b n H 2 K C                     1
ring        send, and recv       forward and backward   b n H 2 K                       C - 1
ring        send, and recv       backward               4 n H 2 K (fp32 gradients)      C - 1
==========  ===================  =====================  ==============================  =====

A layer whose block is recomputed (``activation_checkpoint``) issues its forward collectives a second time, in backward.

What one rank sends for a layer, forward and backward, in heads of this rank's tokens times C - 1: Ulysses
(4 N + 4 K') / C, all-gather 4 K, ring 4 K and another 2 K in fp32. As n falls with C, Ulysses alone gets cheaper with
more ranks; the others are cheap where key/value heads are few.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchtrain.config.parallel import CpMode
from torchtrain.distributed.comm_volume import CommVolume, sent_bytes

_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class AttentionSizes:
    """What the volume of one micro-batch depends on."""

    cp_size: int
    num_tokens: int
    """Of a micro-batch, whole sequences: ``micro_batch_size x seq_len``."""
    num_layers: int
    num_attention_heads: int
    """Of one tensor-parallel rank."""
    num_key_value_heads: int
    """Of one tensor-parallel rank."""
    head_dim: int
    element_bytes: int
    """Of the compute dtype."""


def exchanged_key_value_heads(num_key_value_heads: int, cp_size: int) -> int:
    """Key/value heads as Ulysses sends them: repeated so that every rank gets equally many, each the right one."""
    return math.lcm(num_key_value_heads, cp_size)


def plan_attention_volume(
    mode: CpMode, sizes: AttentionSizes, *, num_micro_batches: int, num_recomputed_layers: int = 0
) -> tuple[CommVolume, ...]:
    """Evaluate the formulas of this file for one optimizer step.

    Args:
        mode: ``accelerator.cp_mode``.
        sizes: The model's and the batch's.
        num_micro_batches: Of one step, per rank.
        num_recomputed_layers: Layers whose block is recomputed in backward.

    Returns:
        Volumes of the axis ``cp``, of no FSDP unit; none where the axis is one rank.
    """
    if sizes.cp_size == 1:
        return ()
    forward = list(_forward(mode, sizes))
    phases = (
        ("forward", forward, sizes.num_layers),
        ("backward", list(_backward(mode, sizes)), sizes.num_layers),
        ("backward", forward, num_recomputed_layers),
    )
    totals: dict[tuple[str, str], list[int]] = {}
    for phase, collectives, num_layers in phases:
        times = num_layers * num_micro_batches
        for kind, size in collectives if times else ():
            total = totals.setdefault((phase, kind), [0, 0, 0])
            total[0] += times
            total[1] += times * size
            total[2] += times * sent_bytes(kind, size, sizes.cp_size)
    return tuple(CommVolume(None, phase, kind, "cp", *total) for (phase, kind), total in totals.items())


def _forward(mode: CpMode, sizes: AttentionSizes) -> Iterator[tuple[str, int]]:
    """Kind and payload of each collective of one layer."""
    head = _head_bytes(sizes)
    if mode == "ulysses":
        yield from _exchanges(sizes)
    elif mode == "allgather":
        yield "all_gather", head * 2 * sizes.num_key_value_heads * sizes.cp_size
    else:
        yield from _hops(sizes, head * 2 * sizes.num_key_value_heads)


def _backward(mode: CpMode, sizes: AttentionSizes) -> Iterator[tuple[str, int]]:
    head = _head_bytes(sizes)
    if mode == "ulysses":
        yield from _exchanges(sizes)
    elif mode == "allgather":
        yield "reduce_scatter", head * 2 * sizes.num_key_value_heads * sizes.cp_size
    else:
        share = head * 2 * sizes.num_key_value_heads
        yield from _hops(sizes, share)
        yield from _hops(sizes, share // sizes.element_bytes * _GRADIENT_BYTES)


def _head_bytes(sizes: AttentionSizes) -> int:
    """One head of this rank's tokens."""
    return sizes.element_bytes * (sizes.num_tokens // sizes.cp_size) * sizes.head_dim


def _exchanges(sizes: AttentionSizes) -> Iterator[tuple[str, int]]:
    keys = exchanged_key_value_heads(sizes.num_key_value_heads, sizes.cp_size)
    yield "all_to_all", _head_bytes(sizes) * (sizes.num_attention_heads + 2 * keys)
    yield "all_to_all", _head_bytes(sizes) * sizes.num_attention_heads


def _hops(sizes: AttentionSizes, share: int) -> Iterator[tuple[str, int]]:
    for _ in range(sizes.cp_size - 1):
        yield "send", share
        yield "recv", share
