"""Which tokens of its sequences this rank computes: all of them, or under context parallelism one share.

Shape legend: B = batch, T = tokens of the whole sequence, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.config.job import Job
from torchtrain.data.batch import Batch
from torchtrain.distributed.context_parallel.sequence_layout import SequenceLayout, resolve_sequence_layout
from torchtrain.distributed.meshes import Meshes


@dataclass(frozen=True)
class Prompt:
    """This rank's share of one prompt, padded on the right to a length that the topology can cut."""

    input_ids_1T: Tensor
    positions_1T: Tensor
    last_index: int
    """Where the prompt's last token is in this share, 0 where it is not."""
    holds_last: bool

    def logits_after(self, logits_1TV: Tensor) -> Tensor:
        """Pick ``logits_V`` after the last token, zeros where another share holds it: a sum over shares is whole."""
        logits_V = logits_1TV[0, self.last_index].contiguous()
        # Not multiplied by 0, which an infinite logit of some other token would survive.
        return logits_V if self.holds_last else torch.zeros_like(logits_V)


@dataclass(frozen=True)
class SequenceShard:
    """One rank's share of the tokens."""

    layout: SequenceLayout
    multiple: int
    """What a sequence's length must be a multiple of."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other shares, None where there is but one."""

    def take(self, batch: Batch) -> Batch:
        """Cut what belongs to a token; document ids stay whole, because attention compares them across shares."""
        if self.group is None:
            return batch
        return replace(
            batch,
            input_ids_BT=self.layout.take(batch.input_ids_BT),
            labels_BT=self.layout.take(batch.labels_BT),
            positions_BT=self.layout.take(batch.positions_BT),
        )

    def pad_prompt(self, ids: Sequence[int], device: torch.device) -> Prompt:
        """Pad a prompt and cut it. Attention is causal: what stands behind the last token does not reach it."""
        length = -(-len(ids) // self.multiple) * self.multiple
        padded = torch.tensor([[*ids, *[0] * (length - len(ids))]], device=device)
        positions_1T = torch.arange(length, device=device)[None]
        if self.group is None:
            return Prompt(padded, positions_1T, len(ids) - 1, holds_last=True)
        mine_1T = self.layout.take(positions_1T)
        found = (mine_1T[0] == len(ids) - 1).nonzero()
        holds_last = len(found) == 1
        return Prompt(self.layout.take(padded), mine_1T, int(found[0]) if holds_last else 0, holds_last=holds_last)


def plan_sequence_shard(job: Job, meshes: Meshes) -> SequenceShard:
    """Derive this rank's share from the job."""
    accelerator = job.accelerator
    cp_size = meshes.topology.cp_size
    layout = resolve_sequence_layout(accelerator.cp_mode, cp_size, meshes.cp_rank)
    return SequenceShard(
        layout,
        multiple=layout.num_pieces * (meshes.topology.tp_size if accelerator.sequence_parallel else 1),
        group=meshes.device_mesh["cp"].get_group() if cp_size > 1 else None,
    )
