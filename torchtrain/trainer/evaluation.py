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
from torchtrain.trainer.stopping import ShouldStop


def evaluate(
    step: int,
    model: nn.Module,
    forward_backward: ForwardBackward,
    batches: Iterable[Batch],
    *,
    meshes: Meshes,
    source_names: tuple[str, ...],
    should_stop: ShouldStop,
) -> EvalReport | None:
    """Mean token loss over ``batches`` of all ranks.

    Returns:
        None where a signal cut it short, which is looked for before every batch.

    Collective: the whole world, with equally many batches on every rank.
    """
    started = time.perf_counter()
    sums = LossSums(source_names, meshes.device)
    is_whole = True
    model.eval()
    for batch in batches:
        if should_stop():
            is_whole = False
            break
        forward_backward.evaluate(batch.to(meshes.device), sums)
    forward_backward.end_forwards()
    model.train()
    if not is_whole:
        return None
    totals = sums.reduced(meshes.loss_group).tolist()
    num_tokens = sums.num_tokens(totals)
    loss = totals[0] / num_tokens if num_tokens else float("nan")
    return EvalReport(step=step, loss=loss, tokens=num_tokens, time_s=time.perf_counter() - started)
