"""Cross-entropy on vocabulary shards: of the logits nothing travels but three numbers a token.

Shape legend: B = batch, T = tokens, D = hidden size, V = this rank's classes.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ReduceOp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from torchtrain.distributed.dtensor_internals import local_slices
from torchtrain.losses.linear_cross_entropy import VocabularyShard, linear_token_losses


class VocabParallelLoss:
    """Token losses of a head whose weight is split over tp by classes. A ``nn.decoder.TokenLoss``.

    Args:
        tp_mesh: The tp axis.
        is_sequence_parallel: Whether the head's input is this rank's share of the sequence; it is gathered here, and in
            backward reduce-scattered. Otherwise it is whole and in backward all-reduced.
        chunk_size: Tokens whose logits exist at a time; None keeps those of all.

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3, for the loss on shards.
    """

    def __init__(self, tp_mesh: DeviceMesh, *, is_sequence_parallel: bool, chunk_size: int | None) -> None:
        self._mesh = tp_mesh
        self._stream: Placement = Shard(1) if is_sequence_parallel else Replicate()
        self._chunk_size = chunk_size

    def __call__(self, x_BTD: Tensor, lm_head: nn.Linear, labels_BT: Tensor) -> Tensor:
        """Score every token; see ``TokenLoss``. The head has no bias.

        Collective: the ranks of the tp axis.
        """
        weight = lm_head.weight
        assert isinstance(weight, DTensor), "the head is split over tp before its loss is installed"
        whole_BTD = (
            DTensor.from_local(x_BTD, self._mesh, (self._stream,), run_check=False)
            .redistribute(placements=(Replicate(),))
            # Each rank's gradient is what its classes contribute.
            .to_local(grad_placements=(Partial(),))
        )
        shard = VocabularyShard(local_slices(weight)[0].start, weight.shape[0], self._maximum, self._sum)
        return linear_token_losses(whole_BTD, weight.to_local(), labels_BT, chunk_size=self._chunk_size, shard=shard)

    def _maximum(self, values: Tensor) -> Tensor:
        return self._all_reduced(values, ReduceOp.MAX)

    def _sum(self, values: Tensor) -> Tensor:
        return self._all_reduced(values, ReduceOp.SUM)

    def _all_reduced(self, values: Tensor, operation: ReduceOp.RedOpType) -> Tensor:
        result = values.clone()
        dist.all_reduce(result, operation, group=self._mesh.get_group())
        return result
