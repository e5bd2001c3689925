"""What tensor parallelism moves in a step is its closed formula, to the byte, on the axis ``tp``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.test_comm_trace import Volumes, collectives, trace_one_step
from tests.parity.test_tensor_parallel import GROUPED, LP, SHARD_2, SP, TP
from tests.shared_ranks import SharedRanks
from torchtrain.distributed.tensor_volume import TensorSizes, plan_tensor_volume
from torchtrain.testing.ranks import run_ranks

SIZES = TensorSizes(
    tp_size=2,
    num_tokens=2 * 16,
    num_layers=2,
    hidden_size=32,
    vocab_size=101,
    element_bytes=4,
    is_sequence_parallel=False,
    is_loss_parallel=False,
)
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "whole_stream": (2, (TP,)),
    "whole_stream_recomputed": (2, (TP, LP, "activation_checkpoint.mode=full")),
    "sequence_parallel_bf16": (4, (SHARD_2, TP, SP, "fsdp_config.mix_precision.param_dtype=bfloat16")),
    "sequence_and_loss_parallel": (4, (SHARD_2, TP, SP, LP, "training.loss_chunk_size=5")),
    "sequence_parallel_recomputed": (2, (TP, SP, LP, "activation_checkpoint.mode=full")),
}


TRACES = SharedRanks(
    trace_one_step,
    {name: (size, (GROUPED, "training.micro_batch_size=2", *overrides)) for name, (size, overrides) in CASES.items()},
)


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_tensor_parallel_axis_are_the_closed_formula_to_the_byte(
    name: str, chosen_rows: list[str]
) -> None:
    world_size, overrides = CASES[name]
    records, _ = TRACES.take(name, chosen_rows)[0]
    sizes = replace(
        SIZES,
        element_bytes=2 if "bf16" in name else 4,
        is_sequence_parallel=SP in overrides,
        is_loss_parallel=LP in overrides,
    )
    volumes = plan_tensor_volume(
        sizes,
        num_micro_batches=4 // (world_size // 2),
        num_recomputed_layers=2 if "recomputed" in name else 0,
    )
    for rank in range(world_size):
        moved: Volumes = {}
        for record in collectives(records, rank):
            if record["axis"] == "tp" and record["phase"] in ("forward", "backward"):
                assert record["unit"] is None
                key = ("", record["phase"], record["kind"], "tp")
                count, num_bytes, sent = moved.get(key, (0, 0, 0))
                moved[key] = (count + 1, num_bytes + record["bytes"], sent + record["sent_bytes"])
        assert moved == {("", v.phase, v.kind, v.axis): (v.count, v.bytes, v.sent_bytes) for v in volumes}


def test_partial_gradients_are_summed_in_one_collective_a_step() -> None:
    records, _ = run_ranks(trace_one_step, 4, GROUPED, SHARD_2, TP, SP, "training.micro_batch_size=1")[0]
    sums = [
        record["bytes"]
        for record in collectives(records)
        if record["axis"] == "tp" and record["phase"] == "optimizer" and record["bytes"] > 4
    ]
    num_norms, shard = 2 * SIZES.num_layers + 1, SIZES.hidden_size // 2
    assert sums == [num_norms * shard * 4]


def test_sequence_parallel_sends_what_the_whole_stream_does() -> None:
    def sent(*, is_sequence_parallel: bool) -> int:
        sizes = replace(SIZES, is_sequence_parallel=is_sequence_parallel)
        return sum(volume.sent_bytes for volume in plan_tensor_volume(sizes, num_micro_batches=1))

    assert sent(is_sequence_parallel=True) == sent(is_sequence_parallel=False)


def test_one_rank_moves_nothing() -> None:
    assert plan_tensor_volume(replace(SIZES, tp_size=1), num_micro_batches=1) == ()
