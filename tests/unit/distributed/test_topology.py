from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtrain.config.load import read_job
from torchtrain.distributed.topology import Topology, fewest_ranks, find_topology_faults, find_topology_warnings
from torchtrain.errors import TopologyError


def job_of(*, tp=1, cp=1, ep=1, pp=1, shard=1, edp_shard=1, batch=None, micro=1, words=()):
    reading = read_job(
        None,
        [
            f"accelerator={{tp_size: {tp}, cp_size: {cp}, ep_size: {ep}, pp_size: {pp}}}",
            f"fsdp_config={{dp_shard_size: {shard}, edp_shard_size: {edp_shard}}}",
            f"training={{global_batch_size: {batch or 4096}, micro_batch_size: {micro}}}",
            *words,
        ],
    )
    assert reading.faults == ()
    return reading.job


# world, tp, cp, ep, pp, dp_shard, edp_shard -> dp, dp_replicate, edp, edp_replicate, has an FSDP domain
LEGAL = [
    # One rank, and pure replication, which is not "no FSDP".
    (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, False),
    (2, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, True),
    (8, 1, 1, 1, 1, 1, 1, 8, 8, 8, 8, True),
    (3, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, True),
    # FSDP and HSDP.
    (2, 1, 1, 1, 1, 2, 1, 2, 1, 2, 2, True),
    (4, 1, 1, 1, 1, 4, 1, 4, 1, 4, 4, True),
    (4, 1, 1, 1, 1, 2, 1, 4, 2, 4, 4, True),
    (6, 1, 1, 1, 1, 3, 1, 6, 2, 6, 6, True),
    (64, 1, 1, 1, 1, 8, 1, 64, 8, 64, 64, True),
    (1024, 1, 1, 1, 1, 1024, 1, 1024, 1, 1024, 1024, True),
    (4096, 1, 1, 1, 1, 8, 1, 4096, 512, 4096, 4096, True),
    # TP alone leaves no FSDP domain.
    (2, 2, 1, 1, 1, 1, 1, 1, 1, 2, 2, False),
    (8, 8, 1, 1, 1, 1, 1, 1, 1, 8, 8, False),
    (8, 2, 1, 1, 1, 4, 1, 4, 1, 8, 8, True),
    (8, 2, 1, 1, 1, 2, 1, 4, 2, 8, 8, True),
    (12, 3, 1, 1, 1, 4, 1, 4, 1, 12, 12, True),
    (1024, 4, 1, 1, 1, 64, 1, 256, 4, 1024, 1024, True),
    # CP adds to the domain, never to the shard degree.
    (2, 1, 2, 1, 1, 1, 1, 1, 2, 2, 2, True),
    (2, 1, 2, 1, 1, 2, 1, 1, 1, 2, 2, True),
    (8, 1, 2, 1, 1, 4, 1, 4, 2, 8, 8, True),
    (8, 1, 2, 1, 1, 8, 1, 4, 1, 8, 8, True),
    (8, 2, 2, 1, 1, 2, 1, 2, 2, 8, 8, True),
    (16, 2, 2, 1, 1, 8, 1, 4, 1, 16, 16, True),
    (24, 2, 3, 1, 1, 6, 1, 4, 2, 24, 24, True),
    # PP divides everything first.
    (2, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, False),
    (4, 1, 1, 1, 2, 2, 1, 2, 1, 2, 2, True),
    (8, 2, 1, 1, 2, 2, 1, 2, 1, 4, 4, True),
    (16, 2, 2, 1, 2, 4, 1, 2, 1, 8, 8, True),
    (4096, 8, 4, 1, 16, 8, 1, 8, 4, 256, 256, True),
    # EP is carved out of the whole stage.
    (4, 1, 1, 4, 1, 1, 1, 4, 4, 1, 1, True),
    (8, 1, 1, 4, 1, 4, 2, 8, 2, 2, 1, True),
    (8, 1, 1, 2, 1, 8, 2, 8, 1, 4, 2, True),
    (8, 1, 1, 2, 1, 8, 4, 8, 1, 4, 1, True),
    (4, 2, 1, 2, 1, 2, 2, 2, 1, 2, 1, True),
    (16, 2, 2, 8, 1, 8, 2, 4, 1, 2, 1, True),
    (16, 2, 1, 2, 2, 4, 4, 4, 1, 4, 1, True),
    (256, 2, 2, 16, 4, 16, 4, 16, 2, 4, 1, True),
    (4096, 4, 2, 64, 8, 64, 8, 64, 2, 8, 1, True),
    # dp x cp = 1: experts alone must still be synced where edp > 1.
    (4, 4, 1, 2, 1, 1, 2, 1, 1, 2, 1, True),
    (4, 4, 1, 4, 1, 1, 1, 1, 1, 1, 1, False),
    (8, 4, 1, 2, 2, 1, 1, 1, 1, 2, 2, True),
    # edp_shard_size without EP changes nothing.
    (8, 1, 1, 1, 1, 8, 4, 8, 1, 8, 2, True),
]  # fmt: skip

# world, tp, cp, ep, pp, dp_shard, edp_shard -> the key at fault and part of what the user reads
ILLEGAL = [
    # Rule 4: the world is no multiple of tp x cp x pp.
    (1, 2, 1, 1, 1, 1, 1, "accelerator.tp_size", "; start 2 ranks in all (on one machine: NGPU=2 "),
    (8, 3, 1, 1, 1, 1, 1, "accelerator.tp_size", "= 3 must divide the world size 8; start 6 or 9 ranks"),
    (8, 1, 3, 1, 1, 1, 1, "accelerator.cp_size", "set accelerator.cp_size to 2 or 4"),
    (8, 1, 1, 1, 3, 1, 1, "accelerator.pp_size", "set accelerator.pp_size to 2 or 4"),
    (8, 2, 8, 1, 1, 1, 1, "accelerator.cp_size", "= 16 must divide the world size 8; start 16 ranks"),
    (12, 2, 2, 1, 2, 1, 1, "accelerator.pp_size", "= 8 must divide the world size 12; start 8 or 16 ranks"),
    (4095, 2, 1, 1, 1, 1, 1, "accelerator.tp_size", "must divide the world size 4095"),
    (4096, 8, 4, 1, 3, 1, 1, "accelerator.pp_size", "set accelerator.pp_size to 2 or 4"),
    # Rule 5: the dp x cp domain is no multiple of dp_shard_size.
    (1, 1, 1, 1, 1, 2, 1, "fsdp_config.dp_shard_size", "1 x 1 = 1 (world size 1); start 2 ranks"),
    (8, 1, 1, 1, 1, 3, 1, "fsdp_config.dp_shard_size", "= 8 x 1 = 8 (world size 8); start 6 or 9 ranks"),
    (8, 1, 1, 1, 1, 16, 1, "fsdp_config.dp_shard_size", "use 8"),
    (8, 2, 1, 1, 1, 8, 1, "fsdp_config.dp_shard_size", "use 4"),
    (8, 1, 2, 1, 2, 8, 1, "fsdp_config.dp_shard_size", "), or use 4"),
    (12, 1, 3, 1, 1, 5, 1, "fsdp_config.dp_shard_size", "= 4 x 3 = 12 (world size 12); start 15 ranks in all"),
    (4096, 8, 1, 1, 1, 1024, 1, "fsdp_config.dp_shard_size", "use 512"),
    # Rule 6: the expert domain is no multiple of ep_size.
    (4, 1, 1, 3, 1, 1, 1, "accelerator.ep_size", "must divide the expert domain dp_size x cp_size x tp_size = 4"),
    (4, 1, 1, 8, 1, 1, 1, "accelerator.ep_size", "use 4"),
    (8, 1, 1, 8, 2, 1, 1, "accelerator.ep_size", "= 4 (world size 8); start 16 ranks in all"),
    (12, 2, 1, 8, 1, 1, 1, "accelerator.ep_size", "use 6 or 12"),
    (4096, 1, 1, 24, 1, 1, 1, "accelerator.ep_size", "use 16 or 32"),
    # Rule 7: edp is no multiple of edp_shard_size.
    (8, 1, 1, 2, 1, 1, 3, "fsdp_config.edp_shard_size", "domain 8 / ep_size 2 = 4; start 6 or 12 ranks in all"),
    (8, 1, 1, 8, 1, 1, 2, "fsdp_config.edp_shard_size", "domain 8 / ep_size 8 = 1; start 16 ranks in all"),
    (16, 2, 1, 2, 2, 1, 8, "fsdp_config.edp_shard_size", "domain 8 / ep_size 2 = 4; start 32 ranks in all"),
    (4, 1, 1, 1, 1, 1, 3, "fsdp_config.edp_shard_size", "domain 4 / ep_size 1 = 4; start 3 or 6 ranks in all"),
    # Sizes that are wrong by themselves.
    (8, 0, 1, 1, 1, 1, 1, "accelerator.tp_size", "must be at least 1"),
    (8, 1, 1, 1, 1, 0, 1, "fsdp_config.dp_shard_size", "must be at least 1"),
    (8, 1, 1, 1, 1, 1, -1, "fsdp_config.edp_shard_size", "must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize("case", LEGAL, ids=str)
def test_legal_sizes_resolve(case):
    world, tp, cp, ep, pp, shard, edp_shard, dp, dp_replicate, edp, edp_replicate, has_fsdp_domain = case
    job = job_of(tp=tp, cp=cp, ep=ep, pp=pp, shard=shard, edp_shard=edp_shard, batch=dp * pp)
    topology = Topology.resolve(job, world)
    assert (topology.dp_size, topology.dp_replicate_size, topology.dp_shard_size) == (dp, dp_replicate, shard)
    assert (topology.edp_size, topology.edp_replicate_size, topology.edp_shard_size) == (edp, edp_replicate, edp_shard)
    assert topology.has_fsdp_domain is has_fsdp_domain
    assert topology.stage_size * pp == world
    assert topology.fsdp_domain_size == dp * cp


@pytest.mark.parametrize("case", ILLEGAL, ids=str)
def test_illegal_sizes_are_refused_with_the_way_out(case):
    world, tp, cp, ep, pp, shard, edp_shard, path, said = case
    job = job_of(tp=tp, cp=cp, ep=ep, pp=pp, shard=shard, edp_shard=edp_shard, batch=4096 * 4095)
    with pytest.raises(TopologyError) as caught:
        Topology.resolve(job, world)
    (fault,) = caught.value.faults
    assert fault.path == path
    assert said in str(fault)


def test_there_are_enough_cases():
    assert len(LEGAL) + len(ILLEGAL) >= 60


def test_independent_faults_are_listed_together():
    job = job_of(ep=3, shard=3, batch=9, words=["compile.fullgraph=true"])
    paths = [fault.path for fault in find_topology_faults(job, 8)]
    assert paths == [
        "fsdp_config.dp_shard_size",
        "accelerator.ep_size",
        "compile.fullgraph",
        "training.global_batch_size",
    ]


@pytest.mark.parametrize("word", ["optimizer.lr=0", "training.steps=0", "training.seq_len=0", "training.output_dir=''"])
def test_a_range_that_is_no_size_does_not_hide_the_topology(word):
    assert [fault.path for fault in find_topology_faults(job_of(shard=3, words=[word]), 8)] == [
        "fsdp_config.dp_shard_size"
    ]


@pytest.mark.parametrize(
    ("world", "sizes", "ranks"),
    [(3, {}, 2), (5, {}, 4), (6, {}, 4), (7, {}, 4), (12, {"tp": 2}, 8), (6, {"shard": 3}, 0)],
)
def test_a_batch_that_does_not_fit_the_ranks_names_the_ranks_that_it_fits(world, sizes, ranks):
    (fault,) = find_topology_faults(job_of(batch=16, **sizes), world)
    assert fault.path == "training.global_batch_size"
    assert (f"or start {ranks} ranks in all (on one machine: NGPU={ranks} ./run_train.sh)" in fault.fix) == (ranks > 0)


def test_sizes_below_one_say_nothing_about_the_world():
    assert find_topology_faults(job_of(tp=0), 8) == []


@pytest.mark.parametrize(
    ("world", "batch", "micro", "cp", "said"),
    [
        (4, 10, 1, 1, "training.micro_batch_size x dp_size = 1 x 4 = 4; use 8 or 12"),
        (4, 2, 1, 1, "use 4"),
        (2, 8, 3, 1, "= 3 x 2 = 6; use 6 or 12, or set training.micro_batch_size to 2 or 4"),
        (8, 6, 1, 2, "= 1 x 4 = 4; use 4 or 8"),
    ],
)
def test_micro_batches_that_do_not_come_out_whole_are_refused(world, batch, micro, cp, said):
    (fault,) = find_topology_faults(job_of(batch=batch, micro=micro, cp=cp), world)
    assert fault.path == "training.global_batch_size"
    assert said in str(fault)


@pytest.mark.parametrize(
    ("world", "batch", "micro", "cp", "steps"),
    [(1, 8, 2, 1, 4), (4, 8, 2, 1, 1), (4, 8, 1, 2, 4), (4096, 8192, 1, 1, 2)],
)
def test_gradient_accumulation_counts_dp_but_not_cp(world, batch, micro, cp, steps):
    job = job_of(batch=batch, micro=micro, cp=cp)
    assert Topology.resolve(job, world).gradient_accumulation_steps(job.training) == steps


@pytest.mark.parametrize(("world", "sizes"), [(2, {}), (2, {"cp": 2}), (4, {"tp": 4, "ep": 2})])
def test_fullgraph_is_refused_with_an_fsdp_domain(world, sizes):
    (fault,) = find_topology_faults(job_of(**sizes, words=["compile.fullgraph=true"]), world)
    assert (fault.path, fault.fix) == ("compile.fullgraph", "set compile.fullgraph: false")


@pytest.mark.parametrize(("world", "sizes"), [(1, {}), (2, {"tp": 2}), (2, {"pp": 2})])
def test_fullgraph_is_legal_without_an_fsdp_domain(world, sizes):
    assert find_topology_faults(job_of(**sizes, words=["compile.fullgraph=true"]), world) == []


@pytest.mark.parametrize(
    ("target", "world", "sizes", "is_refused"),
    [
        ("torch.optim.SGD", 2, {}, True),
        ("torch.optim.Adagrad", 2, {"tp": 2}, True),
        ("torch.optim.SGD", 2, {"pp": 2}, False),
        ("torch.optim.SGD", 1, {}, False),
        ("torch.optim.AdamW", 2, {}, False),
        ("torchtrain.optim.muon.Muon", 2, {}, False),
    ],
)
def test_a_fused_kernel_that_takes_no_shards_is_refused_where_there_are_some(target, world, sizes, is_refused):
    job = job_of(**sizes, words=[f"optimizer._target_={target}", "optimizer.fused=true"])
    faults = find_topology_faults(job, world)
    assert [fault.path for fault in faults] == (["optimizer.fused"] if is_refused else [])


def test_expert_size_under_fsdpturbo_is_the_plugins():
    job = job_of(batch=24, words=["dist_config={name: fsdpturbo, ep_size: 4}"])
    assert Topology.resolve(job, 8).ep_size == 4
    assert [fault.path for fault in find_topology_faults(job, 6)] == ["dist_config.ep_size"]


def test_settings_that_need_several_micro_batches_are_warned_about():
    words = ["fsdp_config.reshard_after_backward=false", "fsdp_config.requires_grad_sync=false"]
    job = job_of(batch=8, micro=2, words=words)
    assert find_topology_warnings(job, Topology.resolve(job, 2)) == []
    warnings = find_topology_warnings(job, Topology.resolve(job, 4))
    assert [warning.split(":")[0] for warning in warnings] == [
        "fsdp_config.reshard_after_backward",
        "fsdp_config.requires_grad_sync",
    ]
    assert all("more than one micro-batch per step" in warning for warning in warnings)


def test_gradient_dtype_without_an_fsdp_domain_is_warned_about():
    job = job_of(words=["fsdp_config.mix_precision.reduce_dtype=float32"])
    assert "more than one data-parallel rank" in find_topology_warnings(job, Topology.resolve(job, 1))[0]
    assert find_topology_warnings(job, Topology.resolve(job, 2)) == []


@pytest.mark.parametrize("name", ["forward_prefetch_depth", "backward_prefetch_depth"])
def test_a_prefetch_depth_without_an_fsdp_domain_is_warned_about(name):
    job = job_of(words=[f"fsdp_config.{name}=2"])
    (warning,) = find_topology_warnings(job, Topology.resolve(job, 1))
    assert warning == f"fsdp_config.{name} = 2 has no effect: it needs more than one data-parallel rank"
    assert find_topology_warnings(job, Topology.resolve(job, 2)) == []


@pytest.mark.parametrize(
    ("sizes", "batch", "ranks"),
    [
        ({}, 16, 1),
        ({"tp": 2, "shard": 2}, 16, 4),
        ({"ep": 4, "shard": 4}, 16, 4),
        ({"tp": 4, "ep": 8, "edp_shard": 2}, 16, 16),
        ({"cp": 2, "shard": 6}, 12, 6),
        ({"pp": 2, "shard": 2}, 16, 4),
        ({"tp": 2}, 3, 2),
        ({"shard": 3}, 16, 3),  # no world fits this batch; the sizes alone do
        ({"tp": 0}, 16, 1),
        ({"tp": 10**20}, 16, 1),
    ],
    ids=str,
)
def test_the_fewest_ranks_are_those_of_all_sizes_together(sizes, batch, ranks):
    job = job_of(**sizes, batch=batch)
    assert fewest_ranks(job) == ranks
    paths = {fault.path for fault in find_topology_faults(job, ranks)}
    assert paths <= {"training.global_batch_size", "accelerator.tp_size"} if ranks in (1, 3) else not paths


@settings(max_examples=60, deadline=None)
@given(st.tuples(*[st.sampled_from([1, 2, 3, 4])] * 5), st.integers(1, 12))
def test_a_number_of_ranks_that_is_advised_is_not_refused_next(sizes, world):
    tp, cp, pp, shard, ep = sizes
    job = job_of(tp=tp, cp=cp, pp=pp, shard=shard, ep=ep, batch=144)
    for fault in find_topology_faults(job, world):
        advised = re.search(r"NGPU=(\d+)", fault.fix)
        assert advised is None or find_topology_faults(job, int(advised[1])) == []


@pytest.mark.parametrize(
    ("ep", "num_experts", "said"),
    [
        (3, 8, "must divide num_experts = 8, of which every rank gets as many; use 2"),
        (
            4,
            8,
            "must divide the expert domain dp_size x cp_size x tp_size = 6 (world size 6); start 4 or 8 ranks in all",
        ),
        (5, 8, "every rank gets as many, and the expert domain dp_size x cp_size x tp_size = 6 (world size 6); use 2"),
        (4, 0, "or use 3 or 6"),
    ],
)
def test_an_expert_size_that_suits_the_world_suits_the_model_too(ep, num_experts, said):
    faults = find_topology_faults(job_of(ep=ep, batch=48), 6, num_experts=num_experts)
    assert [fault.path for fault in faults] == ["accelerator.ep_size"]
    assert said in str(faults[0])


def test_nobody_is_told_to_start_more_ranks_than_there_are():
    (fault,) = find_topology_faults(job_of(words=["accelerator.cp_size=100000000000000000000"]), 2)
    assert "start" not in fault.fix
    assert fault.fix.startswith("set accelerator.cp_size to ")


def test_recomputing_for_every_part_of_a_split_backward_is_warned_about():
    def warnings(schedule, mode):
        job = job_of(pp=2, words=[f"accelerator.pp_schedule={schedule}", f"activation_checkpoint.mode={mode}"])
        return find_topology_warnings(job, Topology.resolve(job, 2))

    (warning,) = warnings("ZBVZeroBubble", "full")
    assert warning.startswith("activation_checkpoint.mode = full computes a block again for its inputs")
    assert warnings("ZBVZeroBubble", "none") == warnings("Interleaved1F1B", "full") == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_that_round_between_micro_batches_are_warned_about(dtype):
    words = [f"fsdp_config.mix_precision.param_dtype={dtype}"]
    several = job_of(batch=8, words=words)
    (warning,) = find_topology_warnings(several, Topology.resolve(several, 2))
    assert warning.startswith(f"fsdp_config.mix_precision.reduce_dtype = null with param_dtype = {dtype} rounds")
    assert "the 4 micro-batches of a step" in warning
    assert warning.endswith("set fsdp_config.mix_precision.reduce_dtype: float32")
    one = job_of(batch=2, words=words)
    assert find_topology_warnings(one, Topology.resolve(one, 2)) == []
    assert find_topology_warnings(several, Topology.resolve(several, 1)) == []
    for other in ("reduce_dtype=float32", "param_dtype=float32"):
        silent = job_of(batch=8, words=[*words, f"fsdp_config.mix_precision.{other}"])
        assert find_topology_warnings(silent, Topology.resolve(silent, 2)) == []


@st.composite
def topologies(draw) -> Topology:
    """Any topology of up to a few thousand ranks, built from the inside so that every size divides."""
    size = st.integers(1, 4)
    pp, tp, cp, dp = draw(size), draw(size), draw(size), draw(size)
    divisor = lambda number: draw(st.sampled_from([d for d in range(1, number + 1) if number % d == 0]))  # noqa: E731
    stage = dp * cp * tp
    ep, shard = divisor(stage), divisor(dp * cp)
    job = job_of(tp=tp, cp=cp, ep=ep, pp=pp, shard=shard, edp_shard=divisor(stage // ep), batch=dp * pp)
    return Topology.resolve(job, pp * stage)


@settings(max_examples=80, deadline=None)
@given(topologies())
def test_every_mesh_holds_every_rank_of_its_stage_once(topology):
    stages = []
    for stage in range(topology.pp_size):
        expected = list(range(stage * topology.stage_size, (stage + 1) * topology.stage_size))
        stages += expected
        for grid in (
            topology.device_mesh_ranks(stage),
            topology.fsdp_non_moe_mesh_ranks(stage),
            topology.fsdp_moe_mesh_ranks(stage),
        ):
            assert list(grid.ranks) == expected
            assert flatten(grid.nested()) == expected
            assert len({grid.coordinate(rank) for rank in grid.ranks}) == math.prod(grid.shape) == topology.stage_size
            for axis, name in enumerate(grid.axis_names):
                groups = grid.groups(name)
                assert sorted(rank for group in groups for rank in group) == expected
                assert all(
                    [grid.coordinate(rank)[axis] for rank in group] == list(range(len(group))) for group in groups
                )
    assert stages == list(range(topology.world_size))


@settings(max_examples=80, deadline=None)
@given(topologies())
def test_tensor_and_expert_ranks_are_innermost(topology):
    for grid, name, size in (
        (topology.device_mesh_ranks(), "tp", topology.tp_size),
        (topology.fsdp_non_moe_mesh_ranks(), "tp", topology.tp_size),
        (topology.fsdp_moe_mesh_ranks(), "ep", topology.ep_size),
    ):
        assert all(group == tuple(range(group[0], group[0] + size)) for group in grid.groups(name))


@settings(max_examples=80, deadline=None)
@given(topologies())
def test_dense_mesh_is_dp_x_cp_reshaped_beside_the_same_tp_groups(topology):
    device, dense = topology.device_mesh_ranks(), topology.fsdp_non_moe_mesh_ranks()
    assert device.groups("tp") == dense.groups("tp")
    for rank in device.ranks:
        dp, cp, tp = device.coordinate(rank)
        replicate, shard, dense_tp = dense.coordinate(rank)
        assert (dp * topology.cp_size + cp, tp) == (replicate * topology.dp_shard_size + shard, dense_tp)


def flatten(nested):
    return [leaf for node in nested for leaf in flatten(node)] if isinstance(nested, list) else [nested]
