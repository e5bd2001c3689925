"""The closed formulas, by hand-made numbers; ``tests/distributed/test_comm_trace.py`` holds them against real runs."""

import subprocess
import sys

import pytest

from torchtrain.config.fsdp import FSDP2Config, MixPrecisionConfig
from torchtrain.distributed.comm_volume import padded_numel, plan_comm_volume, sent_bytes
from torchtrain.distributed.fsdp2.shard_plan import ShardedParameter, ShardPlan, ShardUnit

FUSED = FSDP2Config(comm_fusion=True)


def volumes(config=FUSED, *, axes=(("fsdp_shard", 4),), reshards=True, num_micro_batches=1, frozen=(), whole=False):
    parameters = (ShardedParameter("a", (6, 5)), ShardedParameter("b", (3,), is_replicated=whole))
    unit = ShardUnit("layers.0", "dense", parameters, reshards, (), ())
    plan = ShardPlan((unit,), {"dense": axes}, num_blocks=1)
    found = plan_comm_volume(plan, config, storage_dtype="float32", num_micro_batches=num_micro_batches, frozen=frozen)
    return {(v.phase, v.kind, v.axis): (v.count, v.bytes) for v in found}


GATHER_FORWARD, GATHER_BACKWARD = ("forward", "all_gather", "fsdp_shard"), ("backward", "all_gather", "fsdp_shard")
SCATTER, REPLICAS = ("backward", "reduce_scatter", "fsdp_shard"), ("backward", "all_reduce", "fsdp_replicate")
# On four ranks 6 rows become 8 and 3 elements become 4.
PADDED = 8 * 5 + 4


def test_zero3_moves_three_times_the_padded_parameters():
    assert volumes() == dict.fromkeys((GATHER_FORWARD, GATHER_BACKWARD, SCATTER), (1, 4 * PADDED))


def test_each_parameter_travels_alone_without_fusion():
    assert volumes(FSDP2Config())[SCATTER] == (2, 4 * PADDED)


def test_without_reshard_after_forward_backward_gathers_nothing():
    assert GATHER_BACKWARD not in volumes(reshards=False)


def test_kept_parameters_are_gathered_once_forward_however_many_micro_batches():
    config = FSDP2Config(comm_fusion=True, reshard_after_backward=False)
    found = volumes(config, num_micro_batches=3)
    assert (found[GATHER_FORWARD], found[GATHER_BACKWARD]) == ((1, 4 * PADDED), (3, 12 * PADDED))


@pytest.mark.parametrize(("syncs", "times"), [(True, 3), (False, 1)])
def test_gradients_are_scattered_as_often_as_they_are_synced(syncs, times):
    found = volumes(FSDP2Config(comm_fusion=True, requires_grad_sync=syncs), num_micro_batches=3)
    assert found[SCATTER] == (times, times * 4 * PADDED)


def test_replicas_reduce_one_shard_once_a_step():
    found = volumes(axes=(("fsdp_replicate", 2), ("fsdp_shard", 4)), num_micro_batches=3)
    assert found[REPLICAS] == (1, 4 * PADDED // 4)


def test_pure_replication_reduces_everything_and_gathers_nothing():
    assert volumes(axes=(("fsdp_replicate", 4), ("fsdp_shard", 1))) == {REPLICAS: (1, 4 * 33)}


def test_a_parameter_kept_whole_is_reduced_over_the_domain_alone():
    found = volumes(axes=(("fsdp_replicate", 2), ("fsdp_shard", 4)), whole=True)
    assert found[("backward", "all_reduce", "fsdp_domain")] == (1, 4 * 3)
    assert found[GATHER_FORWARD] == (1, 4 * 40)


def test_a_frozen_parameter_is_gathered_and_not_reduced():
    found = volumes(frozen=["a"])
    assert (found[GATHER_FORWARD], found[SCATTER]) == ((1, 4 * PADDED), (1, 4 * 4))


def test_dtypes_of_gathers_and_reductions_are_their_own():
    precision = MixPrecisionConfig(param_dtype="bfloat16", reduce_dtype="float32")
    found = volumes(FSDP2Config(comm_fusion=True, mix_precision=precision))
    assert (found[GATHER_FORWARD], found[SCATTER]) == ((1, 2 * PADDED), (1, 4 * PADDED))
    found = volumes(FSDP2Config(comm_fusion=True, mix_precision=MixPrecisionConfig(param_dtype="bfloat16")))
    assert found[SCATTER] == (1, 2 * PADDED)


@pytest.mark.parametrize(
    ("shape", "dim", "expected"), [((6, 5), 0, 40), ((8, 5), 0, 40), ((3, 8), 1, 24), ((1,), 0, 4), ((0, 5), 0, 0)]
)
def test_padding_is_that_of_the_sharded_dim(shape, dim, expected):
    assert padded_numel(shape, dim, 4) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_gather", 75), ("reduce_scatter", 75), ("all_reduce", 150), ("send", 100), ("recv", 0), ("barrier", 0)],
)
def test_ring_formula(kind, expected):
    assert sent_bytes(kind, 100, 4) == expected
    assert sent_bytes(kind, 0, 4) == 0


def test_fractions_of_a_byte_are_rounded_up():
    assert sent_bytes("all_reduce", 4, 3) == 6
    assert sent_bytes("all_gather", 1, 4) == 1


def test_formulas_need_no_torch():
    code = "import sys, torchtrain.distributed.comm_volume; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
