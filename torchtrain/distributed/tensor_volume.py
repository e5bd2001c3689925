"""What tensor parallelism must move in one step, in closed form, beside FSDP's ``comm_volume``. No torch.

Symbols: t ranks of the tp axis; L layers of this rank, its embedding and head included (no pipeline); b bytes of an
element in the compute dtype; n = tokens of a micro-batch on one context-parallel rank; D the hidden size; V the
vocabulary, V' = t ceil(V / t).

Per micro-batch, on each rank (payloads, as ``collective_ops`` defines them):

====================  ==============  ========  ===========  ==========  ==============================================
with                  collective      phase     each         times       for
====================  ==============  ========  ===========  ==========  ==============================================
whole stream          all-reduce      forward   b n D        2 L + 1     embedding, output of attention and feed-forward
whole stream          all-reduce      backward  b n D        2 L + 1     input of attention, feed-forward and head
sequence parallel     all-gather      forward   b n D        2 L + 1     input of attention, feed-forward and head
sequence parallel     reduce-scatter  forward   b n D        2 L + 1     embedding, output of attention and feed-forward
sequence parallel     reduce-scatter  backward  b n D        2 L + 1     as the gathers
sequence parallel     all-gather      backward  b n D        2 L + 1     as the reduce-scatters
gathered logits       all-gather      forward   b n V'       1
loss parallel         all-reduce      forward   4 n, 8 n     1           maximum; sum of exponentials, label's logit
====================  ==============  ========  ===========  ==========  ==============================================

A layer that is recomputed gathers the inputs of attention and feed-forward again and reduces the output of attention;
that of feed-forward is needed by nothing.

A ring moves an all-reduce as a reduce-scatter and an all-gather: sequence parallelism sends the same bytes. Once a step
the gradients of norms, sharded by FSDP, are all-reduced with it, (2 L + 1) D elements over dp_shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchtrain.distributed.comm_volume import CommVolume, sent_bytes

_LOSS_BYTES = 4


@dataclass(frozen=True)
class TensorSizes:
    """What the volume of one micro-batch depends on."""

    tp_size: int
    num_tokens: int
    """Of a micro-batch on one context-parallel rank."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    element_bytes: int
    """Of the compute dtype."""
    is_sequence_parallel: bool
    is_loss_parallel: bool


def plan_tensor_volume(
    sizes: TensorSizes, *, num_micro_batches: int, num_recomputed_layers: int = 0
) -> tuple[CommVolume, ...]:
    """Evaluate the formulas of this file for forward and backward of one optimizer step.

    Args:
        sizes: The model's and the batch's.
        num_micro_batches: Of one step, per rank.
        num_recomputed_layers: Layers whose block is recomputed in backward.

    Returns:
        Volumes of the axis ``tp``, of no FSDP unit; none where the axis is one rank.
    """
    if sizes.tp_size == 1:
        return ()
    totals: dict[tuple[str, str], list[int]] = {}
    for phase, kind, size, times in _collectives(sizes, num_recomputed_layers):
        total = totals.setdefault((phase, kind), [0, 0, 0])
        total[0] += times * num_micro_batches
        total[1] += times * num_micro_batches * size
        total[2] += times * num_micro_batches * sent_bytes(kind, size, sizes.tp_size)
    return tuple(CommVolume(None, phase, kind, "tp", *total) for (phase, kind), total in totals.items() if total[0] > 0)


def _collectives(sizes: TensorSizes, num_recomputed_layers: int) -> Iterator[tuple[str, str, int, int]]:
    """Phase, kind, payload and number of each collective of one micro-batch."""
    stream = sizes.element_bytes * sizes.num_tokens * sizes.hidden_size
    times = 2 * sizes.num_layers + 1
    if sizes.is_sequence_parallel:
        for phase in ("forward", "backward"):
            yield phase, "all_gather", stream, times
            yield phase, "reduce_scatter", stream, times
        yield "backward", "all_gather", stream, 2 * num_recomputed_layers
        yield "backward", "reduce_scatter", stream, num_recomputed_layers
    else:
        yield "forward", "all_reduce", stream, times
        yield "backward", "all_reduce", stream, times + num_recomputed_layers
    if sizes.is_loss_parallel:
        yield "forward", "all_reduce", _LOSS_BYTES * sizes.num_tokens, 1
        yield "forward", "all_reduce", 2 * _LOSS_BYTES * sizes.num_tokens, 1
    else:
        padded = -(-sizes.vocab_size // sizes.tp_size) * sizes.tp_size
        yield "forward", "all_gather", sizes.element_bytes * sizes.num_tokens * padded, 1
