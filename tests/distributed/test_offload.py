"""CPU offload on a CPU mesh: the whole lifecycle runs, only the copies between devices are missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from tests.distributed.stored_run import StoredRun
from tests.shared_ranks import SharedRanks
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.config.load import load_job
from torchtrain.distributed.fsdp2.offload import (
    HostMemory,
    build_offload_policy,
    check_whole_builds,
    find_memory_faults,
    host_bytes,
    parameter_device,
)
from torchtrain.distributed.materialize import materialize
from torchtrain.distributed.topology import Topology, find_topology_warnings
from torchtrain.errors import ConfigError
from torchtrain.testing.ranks import run_ranks

OFFLOAD = "fsdp_config.enable_offload=true"
SHARD = "fsdp_config.dp_shard_size=2"
PAIR = (
    "model.init_dtype=bfloat16",
    "optimizer.fp32_main_params=true",
    "fsdp_config.mix_precision={param_dtype: float32, reduce_dtype: float32, fp32_main_grad: true}",
)
WAYS: dict[str, tuple[int, tuple[str, ...]]] = {
    "shard": (2, (SHARD,)),
    "hsdp": (4, (SHARD,)),
    "accumulation, every micro-batch reduced": (2, (SHARD, "training.micro_batch_size=2")),
    "accumulation, last micro-batch reduced": (
        2,
        (SHARD, "training.micro_batch_size=2", "fsdp_config.requires_grad_sync=false"),
    ),
    "deep prefetch": (2, (SHARD, "fsdp_config.forward_prefetch_depth=3", "fsdp_config.backward_prefetch_depth=3")),
    "no reshard": (2, (SHARD, "fsdp_config.reshard_after_forward=false")),
    "fused": (2, (SHARD, "fsdp_config.comm_fusion=true")),
    "main params": (2, (SHARD, *PAIR)),
    "not from meta": (2, (SHARD, "model.init_on_meta=false")),
}


Trained = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], set[bool]]


def train(*overrides: str) -> Trained:
    run = StoredRun(*overrides)
    scalars = run.train(2)
    # On a CPU mesh everything is on the CPU anyway; what shows that the lifecycle ran is what torch was told.
    states = [module._get_fsdp_state() for module in run.model.modules() if isinstance(module, FSDPModule)]
    groups = [group for state in states for group in state._fsdp_param_groups]
    is_offloaded = {parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params}
    return scalars, run.gradients, run.whole_tensors(), is_offloaded


def train_both_ways(*overrides: str) -> tuple[Trained, Trained]:
    return train(*overrides), train(*overrides, OFFLOAD)


RUNS = SharedRanks(train_both_ways, WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_offload_changes_no_bit(way: str, chosen_rows: list[str]) -> None:
    plain, with_offload = RUNS.take(way, chosen_rows)[0]
    scalars, gradients, tensors, is_off = plain
    offloaded_scalars, offloaded_gradients, offloaded, is_on = with_offload
    assert offloaded_scalars == scalars
    for before, after in zip(gradients, offloaded_gradients, strict=True):
        assert all(torch.equal(after[fqn], before[fqn]) for fqn in before)
    assert all(torch.equal(offloaded[name], tensors[name]) for name in tensors)
    assert (is_off, is_on) == ({False}, {True})


def save(folder: Path, *overrides: str) -> list[float]:
    run = StoredRun(SHARD, *overrides, folder=folder)
    run.train(1)
    run.save()
    return run.train(2)


def resume(folder: Path, *overrides: str) -> list[float]:
    run = StoredRun(SHARD, *overrides, folder=folder, resume="auto")
    run.resume()
    return run.train(2)


@pytest.mark.parametrize(("saved_with", "resumed_with"), [((OFFLOAD,), (OFFLOAD,)), ((OFFLOAD,), ()), ((), (OFFLOAD,))])
def test_a_checkpoint_travels_between_offloaded_and_other_runs(
    tmp_path: Path, saved_with: tuple[str, ...], resumed_with: tuple[str, ...]
) -> None:
    through = run_ranks(save, 2, tmp_path, *saved_with)[0]
    assert run_ranks(resume, 2, tmp_path, *resumed_with)[0] == through


def test_memory_is_pinned_only_where_an_accelerator_copies_from_it() -> None:
    config = FSDP2Config(enable_offload=True)
    for device, is_pinned in (("cpu", False), ("cuda", True)):
        policy = build_offload_policy(config, torch.device(device))
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is is_pinned
    assert not isinstance(build_offload_policy(FSDP2Config(), torch.device("cpu")), CPUOffloadPolicy)


def test_offloaded_parameters_start_on_the_cpu_and_buffers_on_the_device() -> None:
    device = torch.device("meta")  # Stands for an accelerator.
    home = parameter_device(FSDP2Config(enable_offload=True), device, has_fsdp_domain=True)
    assert home == torch.device("cpu")
    assert parameter_device(FSDP2Config(), device, has_fsdp_domain=True) == device
    assert parameter_device(FSDP2Config(enable_offload=True), device, has_fsdp_domain=False) == device
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    materialize(model, home, buffer_device=device)
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert {b.device.type for b in model.buffers()} == {"meta"}


def test_host_bytes_counts_parameters_gradients_mains_and_moments() -> None:
    model = nn.Linear(10, 10, bias=False, device="meta")
    assert host_bytes(model, fp32_main_params=False) == 100 * (4 + 4 + 8)
    model.to(torch.bfloat16)
    assert host_bytes(model, fp32_main_params=False) == 100 * (2 + 2 + 4)
    assert host_bytes(model, fp32_main_params=True) == 100 * (2 + 4 + 4 + 8)
    model.requires_grad_(False)
    assert host_bytes(model, fp32_main_params=True) == 100 * 2


def test_parameters_that_have_their_memory_are_not_counted_again() -> None:
    model = nn.Linear(10, 10, bias=False)
    assert host_bytes(model, fp32_main_params=False) == 100 * (4 + 8)
    model.to(torch.bfloat16)
    assert host_bytes(model, fp32_main_params=True) == 100 * (4 + 4 + 8)


def test_the_ranks_of_a_host_are_counted_together() -> None:
    gib = 2**30
    ranks = [HostMemory("a", 2 * gib, 5 * gib), HostMemory("a", 2 * gib, 3 * gib), HostMemory("b", 2 * gib, 3 * gib)]
    (fault,) = find_memory_faults(ranks)
    assert "needs 4.00 GiB of memory on host a" in fault.rule
    assert "its 2 rank(s), but 3.00 GiB are available" in fault.rule
    assert find_memory_faults([HostMemory("a", 2 * gib, None)]) == []


def build_what_does_not_fit(*overrides: str) -> str:
    size = "model.overrides={hidden_size: 65536, intermediate_size: 262144, num_hidden_layers: 80, vocab_size: 200000}"
    with pytest.raises(ConfigError) as caught:
        StoredRun(SHARD, OFFLOAD, size, *overrides)
    return str(caught.value)


def test_a_job_that_does_not_fit_ends_on_every_rank_before_weights_are_allocated() -> None:
    """Terabytes: allocating them would end the test, not raise the error."""
    first, second = run_ranks(build_what_does_not_fit, 2)
    assert first == second
    assert "fsdp_config.enable_offload" in first
    assert "of its 2 rank(s), but" in first


def test_a_job_whose_ranks_cannot_build_the_whole_model_ends_before_they_do() -> None:
    first, second = run_ranks(build_what_does_not_fit, 2, "model.init_on_meta=false")
    assert first == second
    assert "model.init_on_meta" in first
    assert "each of the 2 rank(s) of host" in first
    assert "set model.init_on_meta: true" in first


def build_on_an_accelerator() -> None:
    """The whole model then takes the memory of the device, and nothing is known to be wrong."""
    with torch.device("meta"):
        model = nn.Linear(2**20, 2**24)
    check_whole_builds(model, torch.device("cuda"))


def test_a_whole_model_on_an_accelerator_is_no_matter_of_its_host() -> None:
    run_ranks(build_on_an_accelerator, 1)


def test_offload_without_another_rank_is_named_as_without_effect() -> None:
    job = load_job(None, [OFFLOAD, "dataset.sources=[{path: unused}]"])
    (warning,) = find_topology_warnings(job, Topology.resolve(job, 1))
    assert "fsdp_config.enable_offload has no effect" in warning
