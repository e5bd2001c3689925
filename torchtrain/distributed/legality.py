"""Which technique which model may use: the job check and the table in ``docs/parallelism.md`` read these rules.

What depends on the number of ranks stands in ``topology``; what a family cannot do at all, in its ``architecture``
file under ``UNSUPPORTED``. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from torchtrain.config.job import Job
from torchtrain.config.rules import nearest_divisors, nearest_multiples
from torchtrain.distributed.pipeline_parallel.stage_plan import SPLIT_BACKWARD, find_stage_faults
from torchtrain.distributed.topology import expert_parallel_size, rule_of_expert_count
from torchtrain.errors import Fault

Technique = Literal[
    "tensor parallel",
    "sequence parallel",
    "loss parallel",
    "context parallel, ulysses",
    "context parallel, allgather",
    "context parallel, ring",
    "pipeline parallel",
    "expert parallel",
]

_NO_TENSOR_PARALLEL = "its gated delta nets are not split over tensor-parallel ranks"
_ONLY_ULYSSES = "a gated delta net passes its state along the whole sequence, which a rank has under ulysses only"
DELTA_NET_UNSUPPORTED: dict[Technique, str] = {
    "tensor parallel": _NO_TENSOR_PARALLEL,
    "sequence parallel": _NO_TENSOR_PARALLEL,
    "loss parallel": _NO_TENSOR_PARALLEL,
    "context parallel, allgather": _ONLY_ULYSSES,
    "context parallel, ring": _ONLY_ULYSSES,
}
"""What no family with gated delta nets can do, each with the reason."""


class DecoderSizes(Protocol):
    """What the rules read of an architecture."""

    @property
    def vocab_size(self) -> int: ...  # noqa: D102
    @property
    def num_hidden_layers(self) -> int: ...  # noqa: D102
    @property
    def num_attention_heads(self) -> int: ...  # noqa: D102
    @property
    def num_key_value_heads(self) -> int: ...  # noqa: D102
    @property
    def intermediate_size(self) -> int: ...  # noqa: D102
    @property
    def tie_word_embeddings(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True)
class Rule:
    """One condition of one technique."""

    technique: Technique
    condition: str
    """For the table, as a claim: "num_attention_heads divides by tp_size"."""
    find_faults: Callable[[DecoderSizes, Job], Iterator[Fault]]
    """Yields nothing where the technique is not in use."""


_SPLIT_BY_TP = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def _check_tensor_parallel_sizes(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    tp_size = job.accelerator.tp_size
    sizes = {name: getattr(architecture, name) for name in _SPLIT_BY_TP}
    uneven = [f"{name} = {size}" for name, size in sizes.items() if size % tp_size]
    if uneven:
        legal = nearest_divisors(tp_size, of=math.gcd(*sizes.values()))
        yield Fault("accelerator.tp_size", tp_size, f"must divide {' and '.join(uneven)}", f"use {legal}")


def _check_vocabulary_shards(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    tp_size, vocab_size = job.accelerator.tp_size, architecture.vocab_size

    def leaves_none_empty(size: int) -> bool:
        return math.ceil(vocab_size / size) * (size - 1) < vocab_size

    if not leaves_none_empty(tp_size):
        shared = math.gcd(*(getattr(architecture, name) for name in _SPLIT_BY_TP))
        legal = next(size for size in range(tp_size - 1, 0, -1) if shared % size == 0 and leaves_none_empty(size))
        rule = (
            f"must leave every rank a part of vocab_size = {vocab_size}, in parts of {math.ceil(vocab_size / tp_size)}"
        )
        yield Fault("accelerator.tp_size", tp_size, rule, f"use {legal}")


def _check_vocabulary_pieces(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    """Of a tensor that FSDP cuts within uneven shards, DTensor's arithmetic knows only some layouts.

    It takes the pieces that one FSDP coordinate has of all shards for chunks of their sum. Where they are not, it says
    of a rank's rows what they are not, and weights would be drawn, loaded and saved in the wrong places.
    """
    vocab_size, tp_size = architecture.vocab_size, job.accelerator.tp_size

    def is_known(num_shards: int) -> bool:
        parts = _chunk_sizes(vocab_size, tp_size)
        pieces_of_each = zip(*(_chunk_sizes(part, num_shards) for part in parts), strict=True)
        return all(list(pieces) == _chunk_sizes(sum(pieces), tp_size) for pieces in pieces_of_each)

    dp_shard_size = job.fsdp_config.dp_shard_size
    if not is_known(dp_shard_size):
        smaller = next(n for n in range(dp_shard_size - 1, 0, -1) if dp_shard_size % n == 0 and is_known(n))
        rule = (
            f"must cut the uneven parts that accelerator.tp_size = {tp_size} makes of vocab_size = {vocab_size} alike"
        )
        fix = f"use {smaller}, or a tp_size that divides vocab_size"
        yield Fault("fsdp_config.dp_shard_size", dp_shard_size, rule, fix)


def _chunk_sizes(size: int, num_chunks: int) -> list[int]:
    """Sizes as ``torch.chunk`` makes them, then zeros."""
    chunk = math.ceil(size / num_chunks)
    return [min(max(size - chunk * index, 0), chunk) for index in range(num_chunks)]


def _check_chunks_of_gathered_logits(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    chunk_size = job.training.loss_chunk_size
    if chunk_size is not None and not job.accelerator.loss_parallel:
        rule = "needs accelerator.loss_parallel with accelerator.tp_size > 1, which otherwise gathers all logits"
        yield Fault("training.loss_chunk_size", chunk_size, rule, "set accelerator.loss_parallel: true")


def _check_sequence_parallel_length(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    sizes, seq_len = job.accelerator, job.training.seq_len
    if sizes.cp_size == 1 and seq_len % sizes.tp_size:  # with context parallel, its own rule speaks for both
        yield Fault(
            "training.seq_len",
            seq_len,
            f"must be a multiple of accelerator.tp_size = {sizes.tp_size} with accelerator.sequence_parallel",
            f"use {nearest_multiples(seq_len, of=sizes.tp_size)}",
        )


def _check_context_parallel_length(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    sizes, seq_len = job.accelerator, job.training.seq_len
    factors = {"accelerator.cp_size": sizes.cp_size}
    if sizes.cp_mode == "ring":
        factors = {"2": 2, **factors}
    if sizes.sequence_parallel:
        factors["accelerator.tp_size"] = sizes.tp_size
    multiple = math.prod(factors.values())
    if seq_len % multiple:
        yield Fault(
            "training.seq_len",
            seq_len,
            f"must be a multiple of {' x '.join(factors)} = {multiple} with accelerator.cp_mode: {sizes.cp_mode}",
            f"use {nearest_multiples(seq_len, of=multiple)}",
        )


def _check_ulysses_heads(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    sizes = job.accelerator
    heads = {name: getattr(architecture, name) for name in ("num_attention_heads", "num_key_value_heads")}
    if any(number % sizes.tp_size for number in heads.values()):
        return  # tensor parallelism says so
    local = {name: number // sizes.tp_size for name, number in heads.items()}
    queries, keys = local.values()

    def is_legal(cp_size: int) -> bool:
        return queries % cp_size == 0 and (keys < cp_size or keys % cp_size == 0)

    if is_legal(sizes.cp_size):
        return
    name = "num_attention_heads" if queries % sizes.cp_size else "num_key_value_heads"
    share = f" / accelerator.tp_size = {local[name]}" if sizes.tp_size > 1 else ""
    legal = [size for size in range(2, queries + 1) if is_legal(size)]
    below = [size for size in legal if size < sizes.cp_size][-1:]
    above = [size for size in legal if size > sizes.cp_size][:1]
    use = f"use {' or '.join(map(str, below + above))}, or " if legal else ""
    yield Fault(
        "accelerator.cp_size",
        sizes.cp_size,
        f"must divide {name} = {heads[name]}{share} with accelerator.cp_mode: ulysses",
        f"{use}set accelerator.cp_mode to allgather or ring, which take any number of heads",
    )


def _check_ulysses_delta_net_heads(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    cp_size, heads = job.accelerator.cp_size, getattr(architecture, "linear_num_key_heads", None)
    if heads is not None and heads % cp_size:
        rule = f"must divide linear_num_key_heads = {heads} with accelerator.cp_mode: ulysses"
        yield Fault("accelerator.cp_size", cp_size, rule, f"use {nearest_divisors(cp_size, of=heads)}")


_LENGTH = "seq_len is a multiple of cp_size, with sequence_parallel of cp_size x tp_size"


def _check_shared_expert(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    tp_size, size = job.accelerator.tp_size, getattr(architecture, "shared_expert_intermediate_size", 0)
    if size % tp_size:
        rule = f"must divide shared_expert_intermediate_size = {size}, which tensor parallelism splits"
        yield Fault("accelerator.tp_size", tp_size, rule, f"use {nearest_divisors(tp_size, of=size)}")


def _check_expert_count(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    ep_size, num_experts = expert_parallel_size(job), getattr(architecture, "num_experts", 1)
    if num_experts % ep_size:
        rule = rule_of_expert_count(num_experts)
        yield Fault(_ep_path(job), ep_size, rule, f"use {nearest_divisors(ep_size, of=num_experts)}")


def _check_whole_graph(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    """Of every model, whatever the technique."""
    num_experts = getattr(architecture, "num_experts", 0)
    if job.compile.fullgraph and num_experts:
        rule = f"must be false for a model with experts (num_experts = {num_experts}), whose dispatch breaks the graph"
        yield Fault("compile.fullgraph", True, rule, "set compile.fullgraph: false")


def _ep_path(job: Job) -> str:
    return "dist_config.ep_size" if job.dist_config.name == "fsdpturbo" else "accelerator.ep_size"


def _check_untied(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    if architecture.tie_word_embeddings:
        yield Fault(
            "accelerator.pp_size",
            job.accelerator.pp_size,
            "must be 1 with tied embeddings (model.overrides.tie_word_embeddings: true): embedding and head lie on "
            "different stages, and one matrix cannot be on both",
            "set accelerator.pp_size: 1, or model.overrides.tie_word_embeddings: false",
        )


def _check_stages(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    yield from find_stage_faults(job, num_layers=architecture.num_hidden_layers)


def _check_split_backward(architecture: DecoderSizes, job: Job) -> Iterator[Fault]:
    schedule = job.accelerator.pp_schedule
    if schedule not in SPLIT_BACKWARD:
        return
    path, rule = "accelerator.pp_schedule", "runs backward for inputs and for weights apart, which "
    if job.compile.enabled:
        rule += "a compiled block cannot (compile.enabled: true)"
        fix = "use 1F1B or Interleaved1F1B, or set compile.enabled: false"
        yield Fault(path, schedule, rule, fix)
    elif job.activation_checkpoint.mode == "selective_op":
        rule += "a selective recomputation cannot (activation_checkpoint.mode: selective_op)"
        fix = "use 1F1B or Interleaved1F1B, or set activation_checkpoint.mode: full"
        yield Fault(path, schedule, rule, fix)


RULES: tuple[Rule, ...] = (
    Rule(
        "tensor parallel",
        "tp_size divides num_attention_heads, num_key_value_heads and intermediate_size",
        _check_tensor_parallel_sizes,
    ),
    Rule("tensor parallel", "every rank gets a part of vocab_size, even or not", _check_vocabulary_shards),
    Rule("tensor parallel", "uneven parts of vocab_size are cut alike by dp_shard_size", _check_vocabulary_pieces),
    Rule("tensor parallel", "loss_chunk_size needs loss_parallel", _check_chunks_of_gathered_logits),
    Rule(
        "tensor parallel",
        "tp_size divides shared_expert_intermediate_size; routed experts and their router are not split",
        _check_shared_expert,
    ),
    Rule(
        "sequence parallel",
        "seq_len is a multiple of tp_size, with context parallel of what that says",
        _check_sequence_parallel_length,
    ),
    Rule("context parallel, ulysses", _LENGTH, _check_context_parallel_length),
    Rule(
        "context parallel, ulysses",
        "cp_size divides num_attention_heads / tp_size, and num_key_value_heads / tp_size unless those are fewer",
        _check_ulysses_heads,
    ),
    Rule(
        "context parallel, ulysses",
        "cp_size divides linear_num_key_heads, where there are gated delta nets",
        _check_ulysses_delta_net_heads,
    ),
    Rule("context parallel, allgather", _LENGTH, _check_context_parallel_length),
    Rule(
        "context parallel, ring",
        "seq_len is a multiple of 2 x cp_size, with sequence_parallel of 2 x cp_size x tp_size",
        _check_context_parallel_length,
    ),
    Rule("pipeline parallel", "embedding and head are not tied", _check_untied),
    Rule("pipeline parallel", "every stage has a layer; pp_layers, if given, adds up to all", _check_stages),
    Rule(
        "pipeline parallel",
        "no compile and no selective_op with schedules that split backward: InterleavedZeroBubble, ZBVZeroBubble, "
        "DualPipeV",
        _check_split_backward,
    ),
    Rule("expert parallel", "ep_size divides num_experts", _check_expert_count),
)
"""Every condition; a technique adds its own."""


def techniques_in_use(job: Job) -> dict[Technique, tuple[str, object]]:
    """Techniques that a job asks for, each with the key that does so and its value."""
    sizes = job.accelerator
    in_use: dict[Technique, tuple[str, object]] = {}
    if sizes.tp_size > 1:
        in_use["tensor parallel"] = ("accelerator.tp_size", sizes.tp_size)
        if sizes.sequence_parallel:
            in_use["sequence parallel"] = ("accelerator.sequence_parallel", True)
        if sizes.loss_parallel:
            in_use["loss parallel"] = ("accelerator.loss_parallel", True)
    if sizes.cp_size > 1:
        mode: Technique = f"context parallel, {sizes.cp_mode}"  # pyrefly: ignore[bad-assignment]
        in_use[mode] = ("accelerator.cp_mode", sizes.cp_mode)
    if sizes.pp_size > 1:
        in_use["pipeline parallel"] = ("accelerator.pp_size", sizes.pp_size)
    if expert_parallel_size(job) > 1:
        in_use["expert parallel"] = (_ep_path(job), expert_parallel_size(job))
    return in_use


def find_legality_faults(
    architecture: DecoderSizes, job: Job, *, family: str, unsupported: Mapping[Technique, str]
) -> list[Fault]:
    """List why this model cannot be trained as the job asks.

    Args:
        architecture: The resolved architecture.
        job: A job whose sizes are sound by themselves.
        family: Name of the model family, for messages.
        unsupported: Techniques that the family cannot do, each with the reason.
    """
    in_use = techniques_in_use(job)
    faults = [
        Fault(path, value, f"{technique} is not possible with {family}: {unsupported[technique]}", _way_without(path))
        for technique, (path, value) in in_use.items()
        if technique in unsupported
    ]
    for rule in RULES:
        if rule.technique in in_use and rule.technique not in unsupported:
            faults.extend(rule.find_faults(architecture, job))
    faults.extend(_check_whole_graph(architecture, job))
    return faults


def _way_without(path: str) -> str:
    """How to do without a technique, by the key that asks for it."""
    if path == "accelerator.cp_mode":
        return "set accelerator.cp_mode: ulysses, or accelerator.cp_size: 1"
    return f"set {path}: {'1' if path.endswith('_size') else 'false'}"


def find_model_warnings(architecture: DecoderSizes, job: Job) -> list[str]:
    """Name each setting that does nothing with this model, or not what one expects."""
    warnings, recompute = [], job.activation_checkpoint
    num_layers, has_experts = architecture.num_hidden_layers, getattr(architecture, "num_experts", 0) > 0
    if recompute.mode == "every_nth_block" and recompute.every_n_blocks > num_layers:
        warnings.append(
            f"activation_checkpoint.every_n_blocks = {recompute.every_n_blocks} checkpoints one block only: the model "
            f"has {num_layers}"
        )
    if job.debug.force_balanced_routing and not has_experts:
        warnings.append("debug.force_balanced_routing = true has no effect: it needs a model with experts")
    elif job.debug.force_balanced_routing:
        warnings.append(
            "debug.force_balanced_routing sends tokens to experts in turn, whatever the router says: good for timing, "
            "useless for training"
        )
    if has_experts and not job.dataset.packing:
        warnings.append(
            "dataset.packing = false fills sequences with padding, which is routed like any token: it counts in the "
            "load of experts and in the balance losses. Prefer dataset.packing: true, which keeps documents apart too"
        )
    return warnings
