"""Which layers make a pipeline stage, on which rank it lies and how many micro-batches a schedule needs. No torch.

The cost of a stage is counted in decoder layers: matmul parameters, which is FLOPs per token up to a constant that all
share. A layer costs 1; the head costs ``vocab_size * hidden_size`` over the matmul parameters of a layer; attention
scores are left out, as every layer has the same. The embedding is a lookup and costs no time, but it costs memory, as
many parameters as a head: among splits that are equally fast, it decides.

Layers are dealt out one by one, each to the rank that is cheapest so far, there to its cheapest stage. A pipeline's
steady state waits for its dearest rank, whatever the number of stages it holds; layers being alike, no other split has
a cheaper one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtrain.config.job import Job
from torchtrain.config.parallel import PpSchedule
from torchtrain.errors import Fault

_TWO_STAGES_A_RANK = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of inputs and of weights apart."""


@dataclass(frozen=True)
class StageCosts:
    """What the ends of a model cost beside its layers, in units of one layer."""

    head: float
    """Time of the head, which is also its memory."""
    embedding: float
    """Memory of the embedding."""

    @classmethod
    def of(cls, *, num_matmul_parameters: int, num_layers: int, vocab_size: int, hidden_size: int) -> StageCosts:
        """Compute them from a model's sizes; ``num_matmul_parameters`` counts the head, as ``nn.flops`` does."""
        ends = vocab_size * hidden_size
        layer = max(1, num_matmul_parameters - ends) / max(1, num_layers)
        return cls(head=ends / layer, embedding=ends / layer)


@dataclass(frozen=True)
class PipelineStagePlan:
    """One stage."""

    index: int
    pp_rank: int
    layers: range
    """Global layer indices."""
    is_first: bool
    is_last: bool
    cost: float
    """Time in units of one layer."""


@dataclass(frozen=True)
class PipelinePlan:
    """All stages of a model."""

    schedule: PpSchedule
    pp_size: int
    stages: tuple[PipelineStagePlan, ...]
    """In the order of the forward pass."""

    def stages_of(self, pp_rank: int) -> tuple[PipelineStagePlan, ...]:
        """The stages that lie on one rank, in the order of the forward pass."""
        return tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)

    @property
    def last_pp_rank(self) -> int:
        """Where the head and the losses are."""
        return self.stages[-1].pp_rank

    def describe(self) -> str:
        """One line for the log."""
        parts = []
        for stage in self.stages:
            ends = ("embedding + " if stage.is_first else "", " + head" if stage.is_last else "")
            layers = f"layers {stage.layers[0]}-{stage.layers[-1]}" if len(stage.layers) else "no layer"
            parts.append(f"{stage.index} on rank {stage.pp_rank}: {ends[0]}{layers}{ends[1]} (cost {stage.cost:.2f})")
        return f"pipeline of {len(self.stages)} stages, schedule {self.schedule}: " + "; ".join(parts)


def num_stages(schedule: PpSchedule, pp_size: int) -> int:
    """Stages of a pipeline: two a rank where the schedule wants several, else one."""
    return pp_size * (2 if schedule in _TWO_STAGES_A_RANK else 1)


def rank_of_stage(schedule: PpSchedule, pp_size: int, stage: int) -> int:
    """Where a stage lies: r holds r and r + pp, or in a V r and 2 pp - 1 - r."""
    is_way_back = schedule in _V_SHAPED and stage >= pp_size
    return 2 * pp_size - 1 - stage if is_way_back else stage % pp_size


def plan_pipeline(
    schedule: PpSchedule, *, pp_size: int, num_layers: int, costs: StageCosts, pp_layers: Sequence[int] | None = None
) -> PipelinePlan:
    """Give every layer to a stage and every stage to a rank.

    Args:
        schedule: ``accelerator.pp_schedule``.
        pp_size: Ranks of the pipeline.
        num_layers: Decoder layers; at least as many as stages.
        costs: Of embedding and head.
        pp_layers: ``accelerator.pp_layers``, checked by `find_stage_faults`; None balances.
    """
    stages = num_stages(schedule, pp_size)
    counts = tuple(pp_layers) if pp_layers is not None else _balance(schedule, pp_size, num_layers, costs)
    assert (len(counts), sum(counts)) == (stages, num_layers), "the job check lets no such plan through"
    plan, start = [], 0
    for index, count in enumerate(counts):
        is_last = index == stages - 1
        plan.append(
            PipelineStagePlan(
                index,
                rank_of_stage(schedule, pp_size, index),
                range(start, start + count),
                is_first=index == 0,
                is_last=is_last,
                cost=count + costs.head * is_last,
            )
        )
        start += count
    return PipelinePlan(schedule, pp_size, tuple(plan))


def _balance(schedule: PpSchedule, pp_size: int, num_layers: int, costs: StageCosts) -> tuple[int, ...]:
    stages = num_stages(schedule, pp_size)
    counts = [1] * stages
    time = [1.0 + costs.head * (index == stages - 1) for index in range(stages)]
    memory = [own + costs.embedding * (index == 0) for index, own in enumerate(time)]
    for _ in range(num_layers - stages):

        def load(index: int) -> tuple[float, float, float, int]:
            # Equally fast ranks: take the cheapest stage, which shortens filling and draining, then spare the rank that
            # holds most, then the first ranks, which keep the most micro-batches alive.
            here = rank_of_stage(schedule, pp_size, index)
            mine = [other for other in range(stages) if rank_of_stage(schedule, pp_size, other) == here]
            return (sum(time[i] for i in mine), time[index], sum(memory[i] for i in mine), -index)

        chosen = min(range(stages), key=load)
        counts[chosen] += 1
        time[chosen] += 1
        memory[chosen] += 1
    return tuple(counts)


def can_schedule(schedule: PpSchedule, pp_size: int, num_micro_batches: int) -> bool:
    """Whether a schedule runs so many micro-batches a step.

    All want one for every rank, else some never work. DualPipeV wants one for every stage. The interleaved ones go in
    rounds of at least pp_size micro-batches, all of one length.
    """
    if num_micro_batches < (2 * pp_size if schedule == "DualPipeV" else pp_size):
        return False
    return schedule not in _IN_ROUNDS or num_micro_batches % (num_micro_batches // pp_size) == 0


def find_stage_faults(job: Job, *, num_layers: int) -> Iterator[Fault]:
    """The ways in which a model does not fit the stages that the job asks for."""
    accelerator = job.accelerator
    if accelerator.pp_size <= 1:
        return
    stages = num_stages(accelerator.pp_schedule, accelerator.pp_size)
    a_rank = stages // accelerator.pp_size
    if num_layers < stages:
        legal = list(range(2, num_layers // a_rank + 1))
        fix = f"use {legal[-1]} or fewer" if legal else "use 1"
        if a_rank > 1 and num_layers >= accelerator.pp_size:
            fix += ", or accelerator.pp_schedule: 1F1B, which has one stage a rank"
        yield Fault(
            "accelerator.pp_size",
            accelerator.pp_size,
            f"makes {stages} stages with accelerator.pp_schedule = {accelerator.pp_schedule}, but the model has "
            f"{num_layers} layers and each stage needs one",
            fix,
        )
        return
    yield from _find_layer_list_faults(accelerator.pp_layers, accelerator.pp_schedule, stages, num_layers)


def _find_layer_list_faults(
    pp_layers: Sequence[int] | None, schedule: PpSchedule, stages: int, num_layers: int
) -> Iterator[Fault]:
    if pp_layers is None:
        return
    path, shown = "accelerator.pp_layers", list(pp_layers)
    whole, more = divmod(num_layers, stages)
    example = f"use for example {[whole + (index < more) for index in range(stages)]}, or null"
    if len(pp_layers) != stages:
        yield Fault(path, shown, f"must have one entry for each of the {stages} stages of {schedule}", example)
    elif min(pp_layers) < 1:
        yield Fault(path, shown, "must give each stage a layer", example)
    elif sum(pp_layers) != num_layers:
        rule = f"must add up to the model's {num_layers} layers, but adds up to {sum(pp_layers)}"
        yield Fault(path, shown, rule, example)


def find_micro_batch_faults(job: Job, *, dp_size: int) -> Iterator[Fault]:
    """The fault of a batch that gives the schedule too few micro-batches, or a number that it cannot run."""
    accelerator, total = job.accelerator, job.training.global_batch_size
    size, pp_size, schedule = pp_micro_batch_size(job), accelerator.pp_size, accelerator.pp_schedule
    per_micro_batch = size * dp_size
    if pp_size <= 1 or total % per_micro_batch:
        return
    count = total // per_micro_batch
    if can_schedule(schedule, pp_size, count):
        return
    below = [n for n in range(1, count) if can_schedule(schedule, pp_size, n)][-1:]
    above = next(n for n in range(count + 1, count + 2 * pp_size + 1) if can_schedule(schedule, pp_size, n))
    totals = " or ".join(str(n * per_micro_batch) for n in (*below, above))
    smaller = [
        other
        for other in range(1, job.training.micro_batch_size + 1)
        if job.training.micro_batch_size % other == 0 and can_schedule(schedule, pp_size, total // (other * dp_size))
    ]
    fix = f"use {totals}"
    if smaller:
        fix += f", or set accelerator.pp_micro_batch_size to {smaller[-1]}"
    yield Fault(
        "training.global_batch_size",
        total,
        f"makes {count} pipeline micro-batch{'es' * (count > 1)} ({total} / (pp_micro_batch_size {size} x dp_size "
        f"{dp_size})), but {_demand(schedule, pp_size)}",
        fix,
    )


def _demand(schedule: PpSchedule, pp_size: int) -> str:
    if schedule == "DualPipeV":
        return f"DualPipeV needs at least one for each of its {2 * pp_size} stages"
    if schedule in _IN_ROUNDS:
        return f"{schedule} needs a whole number of equal rounds of at least accelerator.pp_size = {pp_size} of them"
    return f"{schedule} needs at least one for each of accelerator.pp_size = {pp_size} ranks"


def pp_micro_batch_size(job: Job) -> int:
    """Sequences of one pipeline micro-batch."""
    return job.accelerator.pp_micro_batch_size or job.training.micro_batch_size
