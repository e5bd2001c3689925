"""What pipeline stages must send each other in one step, in closed form; the counterpart of ``comm_volume``. No torch.

Symbols: n micro-batches a step; A = b T D e bytes of the residual stream of one micro-batch, b sequences of T tokens of
this rank, hidden size D, e bytes an element. For rank r, o and i count its stages whose next and whose previous stage
lies on another rank.

==========  ================  ============  =======================================================
collective  times             each carries  what
==========  ================  ============  =======================================================
send        n o + n i         A             activations to the next stage, gradients to the previous
recv        n i + n o         A             activations from the previous, gradients from the next
==========  ================  ============  =======================================================

The whole pipeline sends 2 n A for each of its S - 1 boundaries but the one inside a rank at the turn of a V: more
stages a rank mean smaller bubbles and more bytes. Ids, labels, positions and document ids never travel: every rank
reads them. In the first step of a run each boundary carries 4 bytes more in both directions, by which torch agrees that
shapes are declared; FSDP adds what ``comm_volume`` says with one gather and one reduction a step.
"""

from __future__ import annotations

from itertools import pairwise

from torchtrain.config.parallel import PpSchedule
from torchtrain.distributed.comm_volume import CommVolume
from torchtrain.distributed.pipeline_parallel.stage_plan import num_stages, rank_of_stage


def plan_pipeline_volume(
    schedule: PpSchedule, *, pp_size: int, pp_rank: int, num_micro_batches: int, micro_batch_bytes: int
) -> tuple[CommVolume, ...]:
    """Evaluate the formulas of this file for one rank.

    Args:
        schedule: ``accelerator.pp_schedule``.
        pp_size: Ranks of the pipeline.
        pp_rank: The rank's place in it.
        num_micro_batches: Of one optimizer step.
        micro_batch_bytes: A.
    """
    ranks = [rank_of_stage(schedule, pp_size, stage) for stage in range(num_stages(schedule, pp_size))]
    crossings = [(here, there) for here, there in pairwise(ranks) if here != there]
    count = num_micro_batches * sum((pp_rank in crossing) for crossing in crossings)
    num_bytes = count * micro_batch_bytes
    return (
        CommVolume("", "pipeline", "send", "pp", count, num_bytes, num_bytes),
        CommVolume("", "pipeline", "recv", "pp", count, num_bytes, 0),
    )
