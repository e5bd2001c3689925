"""What context parallelism moves in a step is its closed formula, to the byte, on the axis ``cp``."""

from __future__ import annotations

import pytest

from tests.distributed.test_comm_trace import Records, Volumes, collectives, trace_one_step
from tests.shared_ranks import SharedRanks
from torchtrain.config.parallel import CpMode
from torchtrain.distributed.attention_volume import AttentionSizes, plan_attention_volume

BYTES = {"float32": 4, "bfloat16": 2}


def moved(records: Records, rank: int) -> Volumes:
    """What no FSDP unit asked for in forward and backward, as ``measured`` gives what units did."""
    volumes: Volumes = {}
    for record in collectives(records, rank):
        if record["unit"] is None and record["phase"] in ("forward", "backward"):
            key = ("attention", record["phase"], record["kind"], record["axis"])
            count, num_bytes, sent = volumes.get(key, (0, 0, 0))
            volumes[key] = (count + 1, num_bytes + record["bytes"], sent + record["sent_bytes"])
    return volumes


def predict(mode: CpMode, sizes: AttentionSizes, num_micro_batches: int, num_recomputed_layers: int) -> Volumes:
    volumes = plan_attention_volume(
        mode, sizes, num_micro_batches=num_micro_batches, num_recomputed_layers=num_recomputed_layers
    )
    return {("attention", v.phase, v.kind, v.axis): (v.count, v.bytes, v.sent_bytes) for v in volumes}


CASES: list[tuple[CpMode, int, int, int, str, str]] = [
    ("ulysses", 4, 4, 1, "float32", "none"),
    ("ulysses", 2, 4, 2, "float32", "none"),
    ("ulysses", 2, 4, 1, "bfloat16", "full"),
    ("allgather", 4, 3, 1, "float32", "none"),
    ("allgather", 2, 4, 2, "float32", "every_nth_block"),
    ("ring", 4, 4, 2, "bfloat16", "none"),
    ("ring", 2, 3, 1, "float32", "selective_op"),
]


def job_of(case: tuple[CpMode, int, int, int, str, str]) -> tuple[str, ...]:
    mode, cp_size, num_heads, num_key_value_heads, dtype, recompute = case
    return (
        f"accelerator.cp_mode={mode}",
        f"accelerator.cp_size={cp_size}",
        f"model.overrides={{vocab_size: 101, hidden_size: 36, intermediate_size: 37, num_hidden_layers: 2, "
        f"num_attention_heads: {num_heads}, num_key_value_heads: {num_key_value_heads}, head_dim: 10}}",
        f"fsdp_config={{dp_shard_size: {cp_size}, mix_precision: {{param_dtype: {dtype}}}}}",
        f"activation_checkpoint.mode={recompute}",
        "training.micro_batch_size=4",
    )


TRACES = SharedRanks(trace_one_step, {str(case): (case[1], job_of(case)) for case in CASES})


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bytes_of_attention_are_the_closed_formula_to_the_byte(
    case: tuple[CpMode, int, int, int, str, str], chosen_rows: list[str]
) -> None:
    mode, cp_size, num_heads, num_key_value_heads, dtype, recompute = case
    records, _ = TRACES.take(str(case), chosen_rows)[0]
    sizes = AttentionSizes(
        cp_size=cp_size,
        num_tokens=4 * 16,
        num_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=10,
        element_bytes=BYTES[dtype],
    )
    num_recomputed_layers = {"none": 0, "every_nth_block": 1}.get(recompute, 2)
    for rank in range(cp_size):
        assert moved(records, rank) == predict(mode, sizes, 2, num_recomputed_layers)


def test_one_rank_moves_nothing() -> None:
    sizes = AttentionSizes(1, 64, 2, 4, 2, 10, 4)
    assert plan_attention_volume("ring", sizes, num_micro_batches=2) == ()


def test_ulysses_alone_gets_cheaper_with_more_ranks() -> None:
    def sent(mode: CpMode, cp_size: int) -> int:
        volumes = plan_attention_volume(mode, AttentionSizes(cp_size, 4096, 1, 8, 8, 64, 4), num_micro_batches=1)
        return sum(volume.sent_bytes for volume in volumes)

    assert sent("ulysses", 8) < sent("ulysses", 4) < sent("ulysses", 2)
    assert sent("allgather", 8) > sent("allgather", 4) > sent("allgather", 2)
    assert sent("ring", 4) == sent("allgather", 4) * 3 // 2
