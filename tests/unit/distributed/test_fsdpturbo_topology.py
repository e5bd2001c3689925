"""The plugin's expert mesh (edp, efsdp, ep, expert_cp): the document's sizes, its ranks, and what it refuses."""

from __future__ import annotations

import pytest

from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.load import read_job
from torchtrain.config.parallel import DistConfig
from torchtrain.config.rules import find_job_faults
from torchtrain.distributed.topology import Topology, find_topology_faults, find_topology_warnings
from torchtrain.errors import TopologyError

SOURCES = "dataset.sources=[{path: corpus}]"


def job_of(*words: str, cp: int = 1, ep: int | None = None):
    plugin = f"dist_config={{name: fsdpturbo, ep_size: {'null' if ep is None else ep}}}"
    reading = read_job(None, [SOURCES, plugin, f"accelerator.cp_size={cp}", "training.global_batch_size=64", *words])
    assert reading.faults == ()
    return reading.job


def faults_of(job, world: int) -> list[str]:
    return [str(fault) for fault in (*find_job_faults(job), *find_topology_faults(job, world))]


@pytest.mark.parametrize(
    ("world", "cp", "ep", "shape"),
    [
        (1, 1, None, (1, 1, 1, 1)),
        (4, 1, None, (1, 4, 1, 1)),
        (4, 1, 4, (1, 1, 4, 1)),
        (4, 2, 2, (1, 1, 2, 2)),
        (8, 1, 2, (1, 4, 2, 1)),
        (8, 2, 2, (1, 2, 2, 2)),
        (16, 1, 16, (1, 1, 16, 1)),
        (16, 2, 4, (1, 2, 4, 2)),
    ],
)
def test_sizes_are_those_of_the_document(world: int, cp: int, ep: int | None, shape: tuple[int, ...]) -> None:
    topology = Topology.resolve(job_of(cp=cp, ep=ep), world)
    grid = topology.fsdpturbo_mesh_ranks()
    assert grid.axis_names == ("edp", "efsdp", "ep", "expert_cp")
    assert grid.shape == shape
    assert (topology.edp_shard_size, topology.edp_replicate_size) == (shape[1], shape[3])
    assert topology.edp_replicate_size * topology.edp_shard_size * topology.ep_size == world


@pytest.mark.parametrize(("world", "cp", "ep"), [(8, 2, 2), (8, 1, 4), (12, 3, 2), (16, 2, 4)])
def test_ranks_are_the_data_mesh_cut_up(world: int, cp: int, ep: int) -> None:
    # Written out anew: data-parallel rank d holds sequences, its cp ranks their pieces; ep takes neighbouring d.
    groups: dict[str, set[tuple[int, ...]]] = {"efsdp": set(), "ep": set(), "expert_cp": set(), "edp": set()}
    dp = world // cp
    rank_of = {(d, c): d * cp + c for d in range(dp) for c in range(cp)}
    for c in range(cp):
        for first in range(0, dp, ep):
            groups["ep"].add(tuple(rank_of[first + e, c] for e in range(ep)))
        for e in range(ep):
            groups["efsdp"].add(tuple(rank_of[first + e, c] for first in range(0, dp, ep)))
    for d in range(dp):
        groups["expert_cp"].add(tuple(rank_of[d, c] for c in range(cp)))
    groups["edp"] = {(rank,) for rank in range(world)}
    topology = Topology.resolve(job_of(cp=cp, ep=ep), world)
    grid = topology.fsdpturbo_mesh_ranks()
    assert {axis: set(grid.groups(axis)) for axis in groups} == groups
    assert set(topology.device_mesh_ranks().groups("cp")) == groups["expert_cp"]


def test_the_least_that_the_document_writes_is_enough_and_the_rest_has_its_defaults() -> None:
    words = ["accelerator.cp_size=1", "dist_config={name: fsdpturbo, ep_size: 16, ep_dispatcher: eager}"]
    job = read_job(None, [SOURCES, "training.global_batch_size=64", *words]).job
    assert faults_of(job, 16) == []
    assert job.dist_config == DistConfig(name="fsdpturbo", ep_size=16)
    assert job.dist_config.ep_dispatcher == "eager"
    assert job.dist_config.fsdp_implementation == "native"
    assert job.dist_config.hook_modules == job.dist_config.fsdp_ignored_modules == ()


def test_ep_size_must_be_a_size() -> None:
    (fault,) = faults_of(job_of(ep=0), 8)
    assert fault.startswith("dist_config.ep_size = 0: must be at least 1")


def test_ep_size_must_divide_the_data_parallel_ranks() -> None:
    assert faults_of(job_of(cp=2, ep=8), 8) == [
        "dist_config.ep_size = 8: must divide dp_size = world size / cp_size = 4; "
        "start 16 ranks in all (on one machine: NGPU=16 ./run_train.sh), or use 4"
    ]


@pytest.mark.parametrize("name", ["tp_size", "pp_size"])
def test_axes_that_the_mesh_does_not_have_are_refused_by_name(name: str) -> None:
    (fault,) = faults_of(job_of(f"accelerator.{name}=2", ep=2), 8)
    assert fault.startswith(f'accelerator.{name} = 2: must be 1 with dist_config.name "fsdpturbo"')


def test_an_expert_shard_size_that_disagrees_with_the_derived_one_is_refused() -> None:
    (fault,) = faults_of(job_of("fsdp_config.edp_shard_size=4", ep=4), 8)
    assert "fsdpturbo shards experts over efsdp = dp_size / dist_config.ep_size = 2; remove it" in fault
    assert faults_of(job_of("fsdp_config.edp_shard_size=2", ep=4), 8) == []


def test_a_public_expert_size_that_disagrees_is_refused() -> None:
    job = job_of("accelerator.ep_size=4", ep=2)
    (fault,) = find_job_faults(job)
    assert str(fault).startswith("accelerator.ep_size = 4: must agree with dist_config.ep_size = 2")
    with pytest.raises(TopologyError):
        Topology.resolve(job, 8)
    assert faults_of(job_of("accelerator.ep_size=2", ep=2), 8) == []


def test_what_one_of_the_implementations_does_not_heed_is_warned_about() -> None:
    hooks, sync = "dist_config.hook_modules=['*.mlp']", "fsdp_config.requires_grad_sync=false"
    custom = "dist_config.fsdp_implementation=custom"
    (warning,) = find_job_warnings(job_of(hooks, ep=2))
    assert warning.startswith('dist_config.hook_modules = ["*.mlp"] has no effect: it needs')
    assert find_job_warnings(job_of(hooks, custom, ep=2)) == []
    for words, number in (((sync,), 0), ((sync, custom), 1), ((custom,), 0)):
        job = job_of(*words, ep=2)
        told = find_topology_warnings(job, Topology.resolve(job, 4))
        assert len([warning for warning in told if "no effect on experts" in warning]) == number


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cp_size", "write accelerator.cp_size"),
        ("cp_mode", "write accelerator.cp_mode"),
        ("dp_size", "derived from the world size"),
        ("mp_replicate_size", "remove it; set fsdp_config.dp_shard_size"),
        ("mp_shard_size", "write fsdp_config.dp_shard_size"),
        ("dist_timeout", "write accelerator.dist_timeout_s"),
        ("ep_modules", "is decided by the model family"),
        ("ep_fsdp_modules", "is decided by the model family"),
    ],
)
def test_what_the_document_keeps_out_of_the_private_keys_is_told_where_it_belongs(key: str, said: str) -> None:
    (fault,) = read_job(None, [SOURCES, f"dist_config={{name: fsdpturbo, ep_size: 2, {key}: 2}}"]).faults
    assert fault.path == f"dist_config.{key}"
    assert said in str(fault)
