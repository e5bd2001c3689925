"""Forward only through all stages, for evaluation and samples: torch's V schedules cannot run without backward.

Shape legend: B = sequences of a micro-batch, T = tokens of this rank, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.pipeline_parallel.forward_order import plan_forward
from torchtrain.distributed.pipeline_parallel.schedule import ForwardContext, StageSet


@torch.no_grad()
def run_forward(
    stages: StageSet,
    micro_batches: Sequence[Mapping[str, Tensor]],
    *,
    hidden_size: int,
    dtype: torch.dtype,
    num_tokens: int,
    forward_context: ForwardContext,
) -> list[Tensor]:
    """Send micro-batches through the pipeline, stage by stage.

    Args:
        stages: This rank's stages.
        micro_batches: Arguments of the decoder by name, ``inputs`` among them; those of every stage are the same.
        hidden_size: D of the residual stream between stages.
        dtype: Its dtype.
        num_tokens: Its T.
        forward_context: Opened around each forward.

    Returns:
        What the last stage returned for each micro-batch; empty on the other ranks.

    Collective: the pipeline and, with FSDP, the ranks of each stage, with equally many micro-batches.
    """
    chunks = dict(zip(stages.indices, stages.chunks, strict=True))
    here, last = stages.group.rank(), stages.num_stages - 1
    streams: dict[tuple[int, int], Tensor] = {}
    """What comes out of a stage for a micro-batch, until the next stage has it."""
    sends: list[tuple[dist.Work, Tensor]] = []
    actions = plan_forward(stages.schedule, pp_size=stages.pp_size, pp_rank=here, num_micro_batches=len(micro_batches))
    for action in actions:
        stage, number = action.stage, action.micro_batch
        if action.kind == "receive":
            shape = (micro_batches[number]["inputs"].shape[0], num_tokens, hidden_size)
            x_BTD = torch.empty(shape, dtype=dtype, device=stages.device)
            _wait([dist.irecv(x_BTD, group=stages.group, group_src=action.peer)])
            streams[stage - 1, number] = x_BTD
        elif action.kind == "compute":
            arguments = micro_batches[number]
            inputs = streams.pop((stage - 1, number)) if stage else arguments["inputs"]
            with forward_context():
                streams[stage, number] = chunks[stage](**{**arguments, "inputs": inputs})
        else:
            sends.append(_send(streams.pop((stage, number)), stages, action.peer))
    _wait([work for work, _ in sends])
    return [streams[last, number] for number in range(len(micro_batches))] if stages.has_last else []


def _send(output: Tensor, stages: StageSet, target: int | None) -> tuple[dist.Work, Tensor]:
    """Start a send; the tensor comes back too, as it must live until the work is done."""
    tensor = output.contiguous()
    work = dist.isend(tensor, group=stages.group, group_dst=target)
    assert work is not None, "this rank is in the group"
    return work, tensor


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "this rank is in the group"
        work.wait()
