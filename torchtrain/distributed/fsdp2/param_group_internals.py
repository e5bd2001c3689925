"""The one file that reaches into torch's ``FSDPParamGroup``, the object that gathers and reduces for a unit.

torch makes one group of a unit's parameters and copies their shards into the all-gather's buffer. From that this file
makes the other two ways: one group per parameter, and a group whose shards lie in one buffer already. Whether a job
wants either is not decided here but in ``comm_fusion``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.profiler import record_function


def split_param_groups(module: FSDPModule) -> None:
    """Give every parameter of a unit a group of its own, hence collectives of its own."""
    state = module._get_fsdp_state()
    state._fsdp_param_groups = [
        _narrow_group(group, param) for group in state._fsdp_param_groups for param in group.fsdp_params
    ]


def adopt_zero_copy(module: FSDPModule) -> list[str]:
    """Make the groups of a unit gather straight from one buffer each; the parameter objects stay the same.

    Returns:
        For each group that has to keep copying, why. A group with nothing to gather, as one rank holds the whole of its
        parameters, is none of them.
    """
    groups = [group for group in module._get_fsdp_state()._fsdp_param_groups if _gathers(group)]
    obstacles = [_find_obstacle(group.fsdp_params) for group in groups]
    for group, obstacle in zip(groups, obstacles, strict=True):
        if obstacle is None:
            group.__class__ = ZeroCopyParamGroup
    return [obstacle for obstacle in obstacles if obstacle is not None]


@dataclass(frozen=True)
class FlatShards:
    """The shards of a group, padded and one after another as the all-gather wants them."""

    buffer: Tensor
    numels: list[int]
    """Padded elements of each shard."""
    addresses: list[int]
    """Where the local tensor of each parameter began when it was made a view; 0 for an empty one."""

    def are_behind(self, params: Sequence[FSDPParam]) -> bool:
        """Whether every local tensor is still the view it was made."""
        return [param._sharded_local_tensor.data_ptr() for param in params] == self.addresses


class ZeroCopyParamGroup(FSDPParamGroup):
    """A group whose shards are views of one persistent buffer, which is the all-gather's input as it is.

    The buffer is laid out at the first unshard, because only then do parameters surely have their memory and their
    dtype, and again whenever something put other memory under a parameter. As with torch's own padding at that time,
    local tensors taken before are not the parameters' any more: hold parameters, not their local tensors.

    Where ``param_dtype`` differs from the storage dtype, one cast writes the whole buffer into this rank's slice of the
    output; torch casts into a temporary and copies that. Where it does not differ, nothing is copied before the
    collective.

    Numerics: bitwise those of torch's group: the same values travel in the same layout.

    Streams and events are those of torch's ``foreach_all_gather``, and so are the lifetimes, as the buffer outlives
    every gather; gathers end before the optimizer writes because torch waits for them in ``wait_for_unshard`` or
    ``finalize_backward``. None of this was measured on a GPU. A communicator that registers its memory
    (``set_symm_mem``, ``set_allocate_memory_from_process_group``) finds only the output registered, not the buffer.
    """

    device_handle: Any
    _flat_shards: FlatShards | None = None

    def unshard(self, async_op: bool = False) -> None:
        """Start the all-gather, unless torch would not or would gather something other than the shards.

        Collective: the shard axis of the group.
        """
        flat = self._lay_out_shards() if self._is_about_to_gather_shards() else None
        if flat is None:
            super().unshard(async_op)
            return
        with record_function(self._with_fqn("FSDP::all_gather")):
            self._all_gather_result = self._gather(flat, async_op)

    def _is_about_to_gather_shards(self) -> bool:
        is_free = self._all_gather_result is None and self._reshard_after_forward_event is None
        is_wanted = self.unshard_in_backward or self._training_state != TrainingState.PRE_BACKWARD
        return self.is_sharded and is_free and is_wanted

    def _lay_out_shards(self) -> FlatShards | None:
        """The buffer, laid out again if need be; ``None`` where what is there now cannot share one."""
        if self._flat_shards is None or not self._flat_shards.are_behind(self.fsdp_params):
            self._flat_shards = None
            if _find_obstacle(self.fsdp_params) is None:
                self._flat_shards = _flatten(self.fsdp_params)
                # Written on the compute stream, read on the gathers'.
                self._wait_all_gather_streams_on_event(self.device_handle.current_stream().record_event())
        return self._flat_shards

    @torch.no_grad()
    def _gather(self, flat: FlatShards, async_op: bool) -> AllGatherResult:
        group = self._all_gather_process_group
        numel = flat.buffer.numel()
        dtype = self.fsdp_params[0].param_dtype or flat.buffer.dtype
        prepare_stream, gather_stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)
        with self.device_handle.stream(prepare_stream):
            output = self._all_gather_comm.allocate((numel * group.size(),), dtype=dtype, device=self.device)
            source = flat.buffer
            if dtype != source.dtype:
                source = output.narrow(0, numel * group.rank(), numel).copy_(source)
        gather_stream.wait_stream(prepare_stream)
        with self.device_handle.stream(gather_stream):
            work = self._all_gather_comm(output_tensor=output, input_tensor=source, group=group, async_op=async_op)
            return AllGatherResult(
                all_gather_output=output,
                all_gather_event=gather_stream.record_event(),
                all_gather_work=work,
                param_all_gather_input_dtypes=[[dtype]] * len(flat.numels),
                param_all_gather_input_numels=[[shard_numel] for shard_numel in flat.numels],
                all_gather_input_split_sizes=flat.numels,
            )


def _narrow_group(group: FSDPParamGroup, param: FSDPParam) -> FSDPParamGroup:
    # A group built anew would shard the parameter again. Everything mutable that torch does not set itself is replaced.
    narrow = copy.copy(group)
    narrow.fsdp_params = [param]
    narrow._post_forward_indices = []
    narrow._module_to_pre_save_state_dict_hook_handle = {}
    narrow._module_to_pre_load_state_dict_hook_handle = {}
    return narrow


def _gathers(group: FSDPParamGroup) -> bool:
    return isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size > 1


def _find_obstacle(params: Sequence[FSDPParam]) -> str | None:
    """Say what keeps these shards out of one buffer."""
    shards = [param._sharded_local_tensor for param in params]
    if any(param.offload_to_cpu for param in params):
        return "offloaded shards"
    if len({shard.dtype for shard in shards}) > 1:
        return "shards of several dtypes"
    if any(hasattr(shard, "fsdp_pre_all_gather") for shard in shards):
        return "shards that convert themselves"
    return None


@torch.no_grad()
def _flatten(params: Sequence[FSDPParam]) -> FlatShards:
    """Move shards into one new buffer and free what held them; padding is zero, as torch's is."""
    numels = [param.padded_sharded_param_size.numel() for param in params]
    # The first gather may be an evaluation's: tensors born in inference mode could never be trained.
    with torch.inference_mode(False):
        buffer = params[0]._sharded_local_tensor.new_zeros(sum(numels))
        start = 0
        for param, numel in zip(params, numels, strict=True):
            # The same memory as a storage of its own: a DTensor whose local tensor begins further inside its storage
            # can be neither deep-copied nor staged for a checkpoint, as torch takes that offset for an address.
            padded = torch.from_dlpack(buffer.narrow(0, start, numel))
            dim = param.fsdp_placement.dim
            shard = padded.view(param.padded_sharded_param_size).narrow(dim, 0, param.sharded_size[dim])
            shard.copy_(param._sharded_local_tensor)
            param._sharded_param_data = padded
            cast(DTensor, param.sharded_param)._local_tensor = shard
            start += numel
    return FlatShards(buffer, numels, [param._sharded_local_tensor.data_ptr() for param in params])
