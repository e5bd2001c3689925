import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from scripts.trace_comms import (
    Amount,
    Key,
    add_up,
    build_table,
    compare_ranks,
    find_differences,
    main,
    merge_equal_units,
    predict,
)
from torchtrain.metrics.comm_timeline import draw_timeline
from torchtrain.train import check_job

ROOT = Path(__file__).parents[3]
DEBUG_JOB = str(ROOT / "train_configs" / "llama" / "debug_bytes.toml")


def gather(unit, *, rank=0, num_bytes=8):
    return {
        "record": "collective", "step": 1, "rank": rank, "sequence": 0, "micro_batch": 0, "kind": "all_gather",
        "axis": "fsdp_shard", "group_size": 2, "unit": unit, "phase": "forward", "bytes": num_bytes,
        "sent_bytes": num_bytes // 2, "dtype": "float32", "started_s": 0.001, "ended_s": 0.002,
    }  # fmt: skip


def key(unit):
    return Key(unit, "forward", "all_gather", "fsdp_shard")


def shown(table):
    text = io.StringIO()
    Console(width=140, file=text).print(table)
    return text.getvalue()


def test_collectives_of_one_rank_add_up():
    records = [gather("root"), gather("root"), gather("root", rank=1), gather(None)]
    assert add_up(records, rank=0) == {key("root"): Amount(2, 16, 8), key("(no unit)"): Amount(1, 8, 4)}


def test_neighbours_with_equal_rows_become_one_row():
    amounts = add_up([gather(None), gather("root", num_bytes=4), *(gather(f"layers.{i}") for i in range(3))], rank=0)
    assert [name for name, _ in merge_equal_units(amounts)] == [
        "root",
        "layers.0 … layers.2 (3 units, each)",
        "(no unit)",
    ]


def test_a_byte_too_many_and_a_missing_collective_are_differences():
    measured, predicted = {key("a"): Amount(1, 9, 4)}, {key("a"): Amount(1, 8, 4), key("b"): Amount(1, 8, 4)}
    first, second = find_differences(measured, predicted)
    assert first.startswith("a, all_gather in forward over fsdp_shard: the trace has Amount(count=1, bytes=9")
    assert "b, all_gather" in second
    assert "the trace has Amount(count=0" in second
    assert find_differences(predicted, predicted) == []


def test_what_no_unit_asked_for_is_no_difference():
    agreed = Key("(no unit)", "agree", "all_reduce", "world")
    assert find_differences({agreed: Amount(1, 8, 4)}, {}) == []


def test_attention_of_context_parallel_ranks_has_a_formula_and_their_loss_has_none():
    attention = Key("(no unit)", "forward", "all_to_all", "cp")
    assert len(find_differences({attention: Amount(1, 9, 4)}, {attention: Amount(1, 8, 4)})) == 1
    assert find_differences({Key("(no unit)", "optimizer", "all_reduce", "cp"): Amount(1, 8, 4)}, {}) == []


def test_each_rank_is_held_to_its_own_formula_and_stages_may_differ():
    first, second = {key("a"): Amount(1, 8, 4)}, {key("b"): Amount(1, 8, 4)}
    measured, formulas = {0: first, 1: first, 2: second, 3: second}, {0: first, 1: first, 2: second, 3: second}
    assert list(compare_ranks(measured, formulas, stage_size=2)) == []
    (difference,) = compare_ranks(measured, formulas | {3: {key("b"): Amount(1, 9, 4)}}, stage_size=2)
    assert difference.startswith("rank 3: b, all_gather in forward")


def test_without_a_formula_the_ranks_of_a_stage_are_compared():
    measured = {0: {key("a"): Amount(1, 8, 4)}, 1: {key("a"): Amount(2, 8, 4)}}
    assert list(compare_ranks(measured, dict.fromkeys(measured, "why"), stage_size=2)) == [
        "rank 1 communicates otherwise than rank 0"
    ]
    assert list(compare_ranks(measured, dict.fromkeys(measured, "why"), stage_size=1)) == []


def test_a_job_without_a_formula_says_why():
    job = [DEBUG_JOB, "--accelerator.tp_size=2", "--compile.enabled=true"]
    assert "compile.enabled hides" in predict(check_job(job, 2), 0)


def test_table_says_where_the_formula_disagrees():
    amounts = {key("a"): Amount(1, 9, 4), key("b"): Amount(1, 8, 4)}
    lines = shown(build_table(amounts, {key("a"): Amount(2, 1234, 4), key("b"): Amount(1, 8, 4)})).splitlines()
    assert any("2 x, 1,234" in line for line in lines)
    assert any(line.endswith("equal ") for line in lines)


def test_timeline_needs_a_whole_step(tmp_path):
    with pytest.raises(ValueError, match="summary is missing"):
        draw_timeline([gather("root")], title="", out=tmp_path / "a.png")


@pytest.mark.parametrize("num_units", [0, 1, 120])
def test_timeline_is_a_picture_for_any_number_of_units(tmp_path, num_units):
    unfinished = gather("root") | {"ended_s": None}
    summary = {"record": "summary", "step": 1, "rank": 0, "wall_s": 0.01, "totals": []}
    records = [*(gather(f"layers.{i}") for i in range(num_units)), *[unfinished][:num_units], gather(None), summary]
    out = tmp_path / "new" / "timeline.png"
    draw_timeline(records, title="a step", out=out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_job_is_refused_before_anything_starts(capsys):
    assert main([DEBUG_JOB, "--ranks", "2", "--fsdp_config.dp_shard_size=3"]) == 2
    assert "dp_shard_size" in capsys.readouterr().err


@pytest.mark.slow
def test_a_job_is_traced_explained_and_drawn(tmp_path):
    command = [sys.executable, "scripts/trace_comms.py", DEBUG_JOB, "--ranks", "2", "--out", str(tmp_path)]
    overrides = ["--fsdp_config.dp_shard_size=2", "--training.seq_len=32", "--training.global_batch_size=4"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every unit and axis moves what the closed formulas say, to the byte, on all 2 ranks" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"comm_trace.jsonl", "comm_trace.txt", "comm_timeline.png"}
