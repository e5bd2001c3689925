"""What tensor parallelism must move in one step, in closed form, beside FSDP's ``comm_volume``. No torch.

Symbols: t ranks of the tp axis; L layers of this rank; E, H one where it has the embedding, the head, else 0 (without a
pipeline both 1); b bytes of an element in the compute dtype, s in the residual stream's, which under autocast is wider;
n = tokens of a micro-batch on one context-parallel rank; D the hidden size; V the vocabulary, V' = t ceil(V / t).

Per micro-batch, on each rank (payloads, as ``collective_ops`` defines them):

=================  ==============  ========  ===========  =======  ==============================================
with               collective      phase     each         times    for
=================  ==============  ========  ===========  =======  ==============================================
whole stream       all-reduce      forward   b n D        2 L      output of attention and feed-forward
whole stream       all-reduce      forward   s n D        E        embedding
whole stream       all-reduce      backward  s n D        2 L + H  input of attention, feed-forward and head
sequence parallel  all-gather      forward   s n D        2 L + H  input of attention, feed-forward and head
sequence parallel  reduce-scatter  forward   b n D        2 L      output of attention and feed-forward
sequence parallel  reduce-scatter  forward   s n D        E        embedding
sequence parallel  reduce-scatter  backward  s n D        2 L + H  as the gathers
sequence parallel  all-gather      backward  b or s, n D  2 L + E  as the reduce-scatters
gathered logits    all-gather      forward   b n V'       H
loss parallel      all-reduce      forward   4 n, 8 n     H        maximum; sum of exponentials, label's logit
=================  ==============  ========  ===========  =======  ==============================================

A layer that is recomputed gathers the inputs of attention and feed-forward again and reduces the output of attention;
that of feed-forward is needed by nothing.

A ring moves an all-reduce as a reduce-scatter and an all-gather: sequence parallelism sends the same bytes.

Once a step, when backward is over, the gradients of parameters that every rank has whole but sees its own tokens or
heads of are all-reduced, this rank's FSDP shards of them in one piece: with sequence parallelism all norms, (2 L + H) D
elements over dp_shard. The gradient norm then adds up one fp32 number for each way in which FSDP lays out split
matrices: sharded, or kept whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torchtrain.distributed.comm_volume import CommVolume, sent_bytes

_LOSS_BYTES = _NORM_BYTES = 4
_REVERSED = ("reduce_scatter", "all_gather")


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
    stream_bytes: int | None = None
    """Of an element of the residual stream; None: as in the compute dtype."""
    holds_embedding: bool = True
    holds_head: bool = True


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
    elements = sizes.num_tokens * sizes.hidden_size
    output, stream = sizes.element_bytes * elements, (sizes.stream_bytes or sizes.element_bytes) * elements
    num_outputs, num_inputs = 2 * sizes.num_layers, 2 * sizes.num_layers + sizes.holds_head
    if sizes.is_sequence_parallel:
        for phase, into, out_of in (("forward", "all_gather", "reduce_scatter"), ("backward", *_REVERSED)):
            yield phase, into, stream, num_inputs
            yield phase, out_of, output, num_outputs
            yield phase, out_of, stream, sizes.holds_embedding
        yield "backward", "all_gather", stream, 2 * num_recomputed_layers
        yield "backward", "reduce_scatter", output, num_recomputed_layers
    else:
        yield "forward", "all_reduce", output, num_outputs
        yield "forward", "all_reduce", stream, sizes.holds_embedding
        yield "backward", "all_reduce", stream, num_inputs
        yield "backward", "all_reduce", output, num_recomputed_layers
    if sizes.is_loss_parallel:
        yield "forward", "all_reduce", _LOSS_BYTES * sizes.num_tokens, sizes.holds_head
        yield "forward", "all_reduce", 2 * _LOSS_BYTES * sizes.num_tokens, sizes.holds_head
    else:
        padded = -(-sizes.vocab_size // sizes.tp_size) * sizes.tp_size
        yield "forward", "all_gather", sizes.element_bytes * sizes.num_tokens * padded, sizes.holds_head


def plan_partial_gradient_volume(
    numels: Collection[int], *, tp_size: int, gradient_bytes: int, num_layouts: int
) -> tuple[CommVolume, ...]:
    """Evaluate what the axis ``tp`` moves once a step, after backward.

    Args:
        numels: Elements on this rank of each gradient that is partial over tp; see ``tensor_parallel.plan``.
        tp_size: Ranks of the axis.
        gradient_bytes: Of an element of a gradient.
        num_layouts: Ways in which FSDP lays out parameters that tp splits.
    """
    payloads = [gradient_bytes * sum(numels)] * bool(numels) + [_NORM_BYTES] * num_layouts
    if tp_size == 1 or not payloads:
        return ()
    sent = sum(sent_bytes("all_reduce", size, tp_size) for size in payloads)
    return (CommVolume(None, "optimizer", "all_reduce", "tp", len(payloads), sum(payloads), sent),)
