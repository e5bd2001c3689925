"""The mode that the keys ask for, and what of torch's ``FSDPParamGroup`` the other two modes are made of."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult, foreach_all_gather
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.comm_fusion import CommFusion, apply_comm_fusion, resolve_comm_fusion
from torchtrain.testing.ranks import run_ranks


@pytest.mark.parametrize(
    ("is_fused", "is_zero_copy", "expected"),
    [
        (False, None, CommFusion.OFF),
        (False, False, CommFusion.OFF),
        (False, True, CommFusion.OFF),
        (True, False, CommFusion.COPY_IN),
        (True, None, CommFusion.ZERO_COPY),
        (True, True, CommFusion.ZERO_COPY),
    ],
)
def test_zero_copy_is_the_default_of_fusion_and_nothing_without_it(
    is_fused: bool, is_zero_copy: bool | None, expected: CommFusion
) -> None:
    config = FSDP2Config(comm_fusion=is_fused, comm_fusion_zero_copy=is_zero_copy)
    assert resolve_comm_fusion(config) is expected


def test_the_default_job_does_not_fuse() -> None:
    assert resolve_comm_fusion(FSDP2Config()) is CommFusion.OFF


READ_AGAIN = "torch changed what param_group_internals mirrors: read both again, then renew this digest"


@pytest.mark.parametrize(
    ("mirrored", "digest"),
    [
        (FSDPParamGroup.unshard, "63b4858bd8122192"),
        (FSDPParamGroup.wait_for_unshard, "d8a22e680d60d77c"),
        (FSDPParamGroup.finalize_backward, "43e9475a329d4f9d"),
        (foreach_all_gather, "1aa050738aa76be3"),
        (FSDPParam.reset_sharded_param, "f911cdb84d020fc3"),
    ],
)
def test_what_zero_copy_mirrors_or_relies_on_is_as_it_was_read(mirrored: Callable, digest: str) -> None:
    source = inspect.getsource(inspect.unwrap(mirrored))
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == digest, READ_AGAIN


def test_a_gather_result_has_the_fields_that_zero_copy_fills() -> None:
    assert AllGatherResult._fields == (
        "all_gather_output",
        "all_gather_event",
        "all_gather_work",
        "param_all_gather_input_dtypes",
        "param_all_gather_input_numels",
        "all_gather_input_split_sizes",
    )


def containers_of_a_group() -> tuple[set[str], set[str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(3, 3)
    fully_shard(model, mesh=mesh)
    (group,) = model._get_fsdp_state()._fsdp_param_groups
    containers = {name for name, value in vars(group).items() if isinstance(value, list | dict | set)}
    apply_comm_fusion(model, FSDP2Config())
    first, second = model._get_fsdp_state()._fsdp_param_groups
    shared = {name for name in containers if getattr(first, name) is getattr(second, name)}
    return containers, shared


def test_groups_of_single_parameters_share_nothing_that_changes() -> None:
    ((containers, shared),) = run_ranks(containers_of_a_group, 1)
    assert containers == {
        "fsdp_params",
        "_post_forward_indices",
        "_module_to_pre_save_state_dict_hook_handle",
        "_module_to_pre_load_state_dict_hook_handle",
    }
    assert shared == set()
