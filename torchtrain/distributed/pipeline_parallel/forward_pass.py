"""Forward only through all stages, for evaluation and samples: torch's V schedules cannot run without backward.

Shape legend: B = sequences of a micro-batch, T = tokens of this rank, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

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
    handed_on: list[Tensor] = []
    sends: list[tuple[dist.Work, Tensor]] = []
    here = stages.group.rank()
    for chunk, index in zip(stages.chunks, stages.indices, strict=True):
        source = None if index == 0 else stages.rank_of(index - 1)
        target = None if index == stages.num_stages - 1 else stages.rank_of(index + 1)
        # From the last rank to the first only once nothing more is awaited here: that one may still be sending.
        wraps_around = here == stages.pp_size - 1 and target == 0
        outputs = []
        for number, arguments in enumerate(micro_batches):
            inputs = arguments["inputs"]
            if source == here:
                inputs = handed_on[number]
            elif source is not None:
                inputs = torch.empty(inputs.shape[0], num_tokens, hidden_size, dtype=dtype, device=stages.device)
                _wait([dist.irecv(inputs, group=stages.group, group_src=source)])
            with forward_context():
                outputs.append(chunk(**{**arguments, "inputs": inputs}))
            if target not in (None, here) and not wraps_around:
                sends.append(_send(outputs[-1], stages, target))
        if wraps_around:
            sends += [_send(output, stages, target) for output in outputs]
        handed_on = outputs
    _wait([work for work, _ in sends])
    _reshard(stages)
    return handed_on if stages.has_last else []


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


def _reshard(stages: StageSet) -> None:
    """Free the full parameters, which no backward will: with ``reshard_after_forward`` off they outlive a forward."""
    for chunk in stages.chunks:
        for module in chunk.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
