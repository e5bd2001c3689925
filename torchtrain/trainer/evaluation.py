"""Loss on held-out sequences: the same number of forward passes on every rank, so that no collective waits forever."""

from __future__ import annotations

import time
from collections.abc import Iterable

from torch import nn

from torchtrain.data.batch import Batch
from torchtrain.distributed.meshes import Meshes
from torchtrain.metrics.report import EvalReport
from torchtrain.trainer.forward_backward import ForwardBackward
from torchtrain.trainer.losses_by_source import LossSums


def evaluate(
    step: int,
    model: nn.Module,
    forward_backward: ForwardBackward,
    batches: Iterable[Batch],
    *,
    meshes: Meshes,
    source_names: tuple[str, ...],
) -> EvalReport:
    """Mean token loss over ``batches`` of all ranks.

    Collective: the whole world, with equally many batches on every rank.
    """
    started = time.perf_counter()
    sums = LossSums(source_names, meshes.device)
    model.eval()
    for batch in batches:
        forward_backward.evaluate(batch.to(meshes.device), sums)
    forward_backward.end_forwards()
    model.train()
    totals = sums.reduced(meshes.loss_group).tolist()
    num_tokens = sums.num_tokens(totals)
    loss = totals[0] / num_tokens if num_tokens else float("nan")
    return EvalReport(step=step, loss=loss, tokens=num_tokens, time_s=time.perf_counter() - started)
