"""In which order a rank receives, computes and sends where there is no backward. No torch.

A send may last until its receiver asks for it, and then blocks what this rank issues after it. Where a rank has one
stage, each micro-batch is handed on at once: what it waits for comes from before, what it sends goes behind. Where a
rank has several, what is sent comes back, in a loop or in a V, and two ranks that each first send would wait for each
other: a stage sends only after all it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.pipeline_parallel.stage_plan import num_stages, rank_of_stage


@dataclass(frozen=True)
class ForwardAction:
    """One thing that a rank does for one micro-batch in one of its stages."""

    kind: Literal["receive", "compute", "send"]
    stage: int
    micro_batch: int
    peer: int | None = None
    """The other rank of a receive or send."""


def plan_forward(
    schedule: PpSchedule, *, pp_size: int, pp_rank: int, num_micro_batches: int
) -> tuple[ForwardAction, ...]:
    """Order what one rank does, stage by stage; sends and receives of all ranks fit together."""
    ranks = [rank_of_stage(schedule, pp_size, stage) for stage in range(num_stages(schedule, pp_size))]
    has_several = ranks.count(pp_rank) > 1
    actions: list[ForwardAction] = []
    for stage in (index for index, rank in enumerate(ranks) if rank == pp_rank):
        source = None if stage == 0 else ranks[stage - 1]
        target = None if stage == len(ranks) - 1 else ranks[stage + 1]
        held: list[ForwardAction] = []
        for micro_batch in range(num_micro_batches):
            if source not in (None, pp_rank):
                actions.append(ForwardAction("receive", stage, micro_batch, source))
            actions.append(ForwardAction("compute", stage, micro_batch))
            if target not in (None, pp_rank):
                (held if has_several else actions).append(ForwardAction("send", stage, micro_batch, target))
        actions += held
    return tuple(actions)
