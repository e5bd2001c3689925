"""``fsdp_implementation: custom``: hooks of our own gather experts before a pass and reduce their gradients after it.

A weight rests as this rank's slice, a DTensor on (efsdp, ep), which is all that optimizer, norm and checkpoint see.
Around the forward and the backward of its carrier it exists whole, as a tensor that autograd knows as a leaf. Between
passes that tensor keeps its shape and gives back its memory: what autograd saved of it is whole again once it is
gathered again. When the gradients of all weights of a module are there, they are summed over efsdp, each rank keeping
its slice, and over expert_cp.

There is no prefetch; a module's gather ends before its forward begins. Gradients are reduced in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import record_function

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdpturbo.plan import CustomUnit
from torchtrain.nn.moe import RoutedExperts

_DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExpertGroups:
    """Whom the plugin's hooks talk to."""

    mesh: DeviceMesh
    """Axes (expert_cp, efsdp, ep)."""

    @property
    def efsdp(self) -> dist.ProcessGroup:
        """Ranks that share each weight."""
        return self.mesh["efsdp"].get_group()

    @property
    def expert_cp(self) -> dist.ProcessGroup | None:
        """Ranks that have the same slices and saw other tokens; None where there are none."""
        return self.mesh["expert_cp"].get_group() if self.mesh["expert_cp"].size() > 1 else None


def apply_custom_shards(
    model: nn.Module, units: Sequence[CustomUnit], mesh: DeviceMesh, config: FSDP2Config
) -> nn.Module:
    """Cut the experts of ``model`` to this rank's slices and hang the hooks, in place.

    Args:
        model: Expert parallelism has been applied to it.
        units: As planned.
        mesh: Axes (expert_cp, efsdp, ep).
        config: Section ``fsdp_config``: precision, and whether weights are given back after forward.

    Collective: none here; forward and backward of the carriers, by all ranks of efsdp and of expert_cp.
    """
    precision = config.mix_precision
    for unit in units:
        experts = cast(RoutedExperts, model.get_submodule(unit.fqn))
        for name, dim in unit.shard_dims.items():
            setattr(experts, name, _keep_slice(getattr(experts, name), mesh["efsdp", "ep"], dim))
        shards = _ExpertShards(
            experts,
            unit,
            ExpertGroups(mesh),
            compute_dtype=_DTYPES[precision.param_dtype],
            reduce_dtype=_DTYPES[precision.reduce_dtype],
            is_freed_after_forward=config.reshard_after_forward,
        )
        experts.local_weight = shards.whole_of
        carrier = model.get_submodule(unit.carrier)
        carrier.register_forward_pre_hook(shards.before_forward)
        carrier.register_forward_hook(shards.after_forward)
    return model


def _keep_slice(parameter: nn.Parameter, mesh: DeviceMesh, dim: int) -> nn.Parameter:
    local = cast(DTensor, parameter.detach()).to_local()
    own = local.chunk(mesh["efsdp"].size(), dim)[mesh["efsdp"].get_local_rank()].clone()
    split = DTensor.from_local(own, mesh, (Shard(dim), Shard(0)), run_check=False)
    return nn.Parameter(split, parameter.requires_grad)


class _ExpertShards:
    """Gathers and reduces the weights of one module of experts."""

    def __init__(
        self,
        experts: RoutedExperts,
        unit: CustomUnit,
        groups: ExpertGroups,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        is_freed_after_forward: bool,
    ) -> None:
        self._experts = experts
        self._fqn = unit.fqn
        self._dims: Mapping[str, int] = unit.shard_dims
        self._groups = groups
        self._compute_dtype = compute_dtype
        self._reduce_dtype = reduce_dtype
        self._is_freed_after_forward = is_freed_after_forward
        self._whole: dict[str, Tensor] = {}
        self._is_whole = False
        self._is_in_backward = False
        self._num_reduced = 0

    def whole_of(self, weight: Tensor) -> Tensor:
        """The whole of a weight of the module, for ``RoutedExperts.local_weight``."""
        for name, parameter in self._experts.named_parameters(recurse=False):
            if parameter is weight:
                return self._whole[name]
        raise ValueError(f"{self._fqn} has no such weight")

    def before_forward(self, *_: Any) -> None:
        """The carrier's forward begins, or that of its recomputation."""
        self._gather()

    def after_forward(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        """It ends."""
        # Without gradients no backward comes to free them, whatever the job keeps for one.
        if (self._is_freed_after_forward or not torch.is_grad_enabled()) and not self._is_in_backward:
            self._free()
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, _grad: Tensor) -> None:
        self._is_in_backward = True
        self._gather()

    @torch.no_grad()
    def _gather(self) -> None:
        if self._is_whole:
            return
        with record_function(f"FSDP::all_gather ({self._fqn})"):
            for name, dim in self._dims.items():
                self._fill(name, self._gather_one(self._shard(name), dim))
        self._is_whole = True

    def _gather_one(self, shard: Tensor, dim: int) -> Tensor:
        group = self._groups.efsdp
        gathered = shard.new_empty(group.size(), *shard.shape)
        dist.all_gather_single(gathered.flatten(), shard.contiguous().flatten(), group=group)
        return torch.cat(gathered.unbind(), dim=dim)

    def _shard(self, name: str) -> Tensor:
        local = cast(DTensor, getattr(self._experts, name).detach()).to_local()
        return local if self._compute_dtype is None else local.to(self._compute_dtype)

    def _fill(self, name: str, value: Tensor) -> None:
        whole = self._whole.get(name)
        if whole is None:
            parameter = getattr(self._experts, name)
            whole = self._whole[name] = value.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad:
                whole.register_post_accumulate_grad_hook(partial(self._after_gradient))
            return
        whole.untyped_storage().resize_(value.untyped_storage().size())
        # By way of ``data``, which counts no version: autograd is to find what it saved unchanged, and so it is.
        whole.data.copy_(value)

    def _free(self) -> None:
        for whole in self._whole.values():
            whole.untyped_storage().resize_(0)
        self._is_whole = False

    def _after_gradient(self, _whole: Tensor) -> None:
        self._num_reduced += 1
        if self._num_reduced == sum(whole.requires_grad for whole in self._whole.values()):
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        """All gradients of the module are there: sum them, always in the same order."""
        with record_function(f"FSDP::post_backward_reduce ({self._fqn})"):
            for name, whole in self._whole.items():
                if whole.grad is not None:
                    self._add(name, self._reduce_one(whole.grad, self._dims[name]))
                    whole.grad = None
        self._free()
        self._num_reduced, self._is_in_backward = 0, False

    def _reduce_one(self, gradient: Tensor, dim: int) -> Tensor:
        group = self._groups.efsdp
        stacked = torch.stack(gradient.to(self._reduce_dtype or gradient.dtype).chunk(group.size(), dim))
        own = stacked.new_empty(stacked.shape[1:])
        dist.reduce_scatter_single(own.flatten(), stacked.flatten(), group=group)
        if self._groups.expert_cp is not None:
            dist.all_reduce(own, group=self._groups.expert_cp)
        return own

    def _add(self, name: str, own: Tensor) -> None:
        parameter = getattr(self._experts, name)
        shard = cast(DTensor, parameter.data)
        gradient = DTensor.from_local(own.to(shard.dtype), shard.device_mesh, shard.placements, run_check=False)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
