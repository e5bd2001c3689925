"""How often each expert was chosen in a step, over all ranks: for the experts' biases and for the metrics.

Shape legend: E = experts of a layer; F = experts of all layers, layer after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.distributed.expert_parallel.load_counts import axes_of_other_tokens, summing_over
from torchtrain.distributed.meshes import Meshes
from torchtrain.nn.load_balance import LoadReport, report_load
from torchtrain.nn.routing import routers, take_loads, update_expert_biases


class ExpertLoads:
    """Adds up what the routers of this rank counted, with all ranks that saw other tokens or have other layers.

    Args:
        model: This rank's part of the model.
        meshes: Of this rank.
        is_sequence_parallel: Whether ranks of the tp axis have different tokens between blocks.

    Collective: the ranks of a pipeline, when built.
    """

    def __init__(self, model: nn.Module, meshes: Meshes, *, is_sequence_parallel: bool) -> None:
        self._model = model
        self._device = meshes.device
        self._pp_group = meshes.pp_group
        own = {fqn: router.config.num_experts for fqn, router in routers(model)}
        self._sizes = _of_all_stages(own, self._pp_group)
        axes = axes_of_other_tokens(is_sequence_parallel=is_sequence_parallel)
        self._sum = summing_over(meshes.device_mesh, axes)

    @torch.no_grad()
    def take(self) -> Tensor:
        """Return the step's ``counts_F`` of the whole model, int64, equal on all ranks; empty without experts.

        Collective: the whole world, where the model has experts.
        """
        own = take_loads(self._model)
        if not self._sizes:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        counts_F = torch.cat(
            [
                own.get(fqn, torch.zeros(size, dtype=torch.int64, device=self._device))
                for fqn, size in self._sizes.items()
            ]
        )
        counts_F = self._sum(counts_F)
        if self._pp_group is not None:
            dist.all_reduce(counts_F, group=self._pp_group)
        return counts_F

    def update_biases(self, counts_F: Tensor) -> None:
        """Move the experts' biases, on every rank alike."""
        update_expert_biases(self._model, self._by_router(counts_F))

    def report(self, counts_F: Sequence[float]) -> dict[str, LoadReport]:
        """Describe each layer's load, from what ``take`` returned, on the host."""
        return {fqn: report_load(counts_E) for fqn, counts_E in self._by_router(torch.tensor(counts_F)).items()}

    def _by_router(self, counts_F: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._sizes, counts_F.split(list(self._sizes.values())), strict=True)) if self._sizes else {}


def _of_all_stages(own: dict[str, int], pp_group: dist.ProcessGroup | None) -> dict[str, int]:
    """Experts by the fqn of the router, in the same order on all stages."""
    if pp_group is None:
        return own
    stages: list[dict[str, int] | None] = [None] * pp_group.size()
    dist.all_gather_object(stages, own, group=pp_group)
    merged = {fqn: size for stage in cast(list[dict[str, int]], stages) for fqn, size in stage.items()}
    return dict(sorted(merged.items(), key=lambda item: [(len(part), part) for part in item[0].split(".")]))
