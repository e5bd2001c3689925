"""The trace of a step: its bytes are the closed formula's, its order and names are FSDP's, and it changes nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from models.registry import load_spec, resolve_architecture
from tests.end_to_end.launch import metrics, train
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.comm_volume import CommVolume, plan_comm_volume
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.metrics.jsonl import read_jsonl
from torchtrain.optim.build import build_optimizer
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

Records = list[dict[str, Any]]
Volumes = dict[tuple[str, str, str, str], tuple[int, int, int]]


class Collected:
    """A log that keeps everything."""

    def __init__(self) -> None:
        self.records: Records = []
        self.failed: Records = []

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        self.records.extend(records)

    def write_failed_step(self, rank: int, records: Sequence[dict[str, Any]]) -> None:
        self.failed.extend(records)


def trace_one_step(*overrides: str) -> tuple[Records, tuple[CommVolume, ...]]:
    """Records of all ranks (on rank 0) and the formula's volumes, for the second step of the parity model."""
    job = load_job(None, [*MODEL, *overrides])
    topology = Topology.resolve(job, dist.get_world_size())
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    spec = load_spec("llama")
    rank_model = build_model(Run(job, spec, architecture, meshes, is_main=False))
    model = rank_model.module
    optimizer = build_optimizer(model, job.optimizer, device=meshes.device)
    step = build_train_step(job, rank_model, optimizer, meshes)
    log = Collected()
    trace = CommTrace(rank_model.chunks, meshes, log)
    training = job.training
    for index in range(2):
        whole = make_global_batch(index, training.global_batch_size, training.seq_len)
        batches = split_batch(whole, meshes.dp_rank, topology.dp_size, training.micro_batch_size)
        with trace.step(index + 1):
            step.run(index + 1, batches, whole.num_valid_tokens())
    with torch.device("meta"):
        plan = FSDP2Manager(job.fsdp_config, meshes).plan(spec.build(architecture))
    volumes = plan_comm_volume(
        plan,
        job.fsdp_config,
        storage_dtype=job.model.init_dtype,
        num_micro_batches=topology.gradient_accumulation_steps(training),
    )
    return [record for record in log.records if record["step"] == 2], volumes


def collectives(records: Records, rank: int = 0) -> Records:
    return [record for record in records if record["record"] == "collective" and record["rank"] == rank]


def measured(records: Records, rank: int) -> Volumes:
    """What units moved: (unit, phase, kind, axis) → (count, bytes, sent bytes)."""
    volumes: Volumes = {}
    for record in collectives(records, rank):
        if record["unit"] is not None:
            key = (record["unit"], record["phase"], record["kind"], record["axis"])
            count, num_bytes, sent = volumes.get(key, (0, 0, 0))
            volumes[key] = (count + 1, num_bytes + record["bytes"], sent + record["sent_bytes"])
    return volumes


def predicted(volumes: tuple[CommVolume, ...]) -> Volumes:
    return {(v.unit or "", v.phase, v.kind, v.axis): (v.count, v.bytes, v.sent_bytes) for v in volumes}


CASES = [
    (2, "dp_shard_size=2"),
    (2, "dp_shard_size=2", "comm_fusion=true", "comm_fusion_zero_copy=false"),
    (2, "dp_shard_size=2", "comm_fusion=true"),
    (2, "dp_shard_size=2", "reshard_after_forward=false"),
    (2, "dp_shard_size=2", "requires_grad_sync=false", "reshard_after_backward=false", "comm_fusion=true"),
    (2, "dp_shard_size=1"),
    (4, "dp_shard_size=4", "comm_fusion=true"),
    (4, "dp_shard_size=4", "requires_grad_sync=false"),
    (4, "dp_shard_size=4", "mix_precision={param_dtype: bfloat16, reduce_dtype: float32}", "comm_fusion=true"),
    (4, "dp_shard_size=4", "mix_precision={param_dtype: bfloat16}", "requires_grad_sync=false"),
    (4, "dp_shard_size=2"),
    (4, "dp_shard_size=2", "comm_fusion=true", "requires_grad_sync=false"),
    (4, "dp_shard_size=2", "comm_fusion=true", "reshard_after_backward=false", "forward_prefetch_depth=3"),
]


def overrides_of(case: tuple[Any, ...]) -> tuple[str, ...]:
    return ("training.micro_batch_size=1", *(f"fsdp_config.{override}" for override in case[1:]))


KEPT = "fsdp_config.replicate_params=[norm.weight, 'layers.*.input_layernorm.weight']"
KEPT_CASES = [
    (2, "dp_shard_size=2"),
    (2, "dp_shard_size=2", "comm_fusion=true"),
    (4, "dp_shard_size=2", "comm_fusion=true", "requires_grad_sync=false"),
    (4, "dp_shard_size=2"),
]
TRACES = SharedRanks(trace_one_step, {str(case): (case[0], overrides_of(case)) for case in CASES})
KEPT_TRACES = SharedRanks(trace_one_step, {str(case): (case[0], (*overrides_of(case), KEPT)) for case in KEPT_CASES})


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_bytes_of_every_unit_are_the_closed_formula_to_the_byte(case: tuple[Any, ...], chosen_rows: list[str]) -> None:
    world_size = case[0]
    records, volumes = TRACES.take(str(case), chosen_rows)[0]
    for rank in range(world_size):
        assert measured(records, rank) == predicted(volumes)


@pytest.mark.parametrize("case", KEPT_CASES, ids=lambda case: "-".join(map(str, case)))
def test_parameters_kept_whole_are_reduced_over_the_domain_and_never_gathered(
    case: tuple[Any, ...], chosen_rows: list[str]
) -> None:
    records, volumes = KEPT_TRACES.take(str(case), chosen_rows)[0]
    assert measured(records, 0) == predicted(volumes)
    domain = "fsdp_shard" if case[0] == 2 else "fsdp_domain"
    assert ("root", "backward", "all_reduce", domain) in measured(records, 0)


RECOMPUTED = SharedRanks(
    trace_one_step,
    {
        mode: (2, ("fsdp_config.dp_shard_size=2", f"activation_checkpoint.mode={mode}"))
        for mode in ("full", "selective_op")
    },
)


@pytest.mark.parametrize("mode", ["full", "selective_op"])
def test_activation_checkpointing_gathers_nothing_more(mode: str, chosen_rows: list[str]) -> None:
    records, volumes = RECOMPUTED.take(mode, chosen_rows)[0]
    assert measured(records, 0) == predicted(volumes)


def test_collectives_stand_in_issue_order_with_phase_micro_batch_and_axis() -> None:
    records, _ = run_ranks(
        trace_one_step,
        2,
        "fsdp_config.dp_shard_size=2",
        "fsdp_config.comm_fusion=true",
        "fsdp_config.forward_prefetch_depth=0",
        "fsdp_config.backward_prefetch_depth=0",
        "training.micro_batch_size=2",
    )[0]
    found = [(r["micro_batch"], r["phase"], r["kind"], r["unit"], r["axis"]) for r in collectives(records)]
    one_pass = [
        ("forward", "all_gather", "root", "fsdp_shard"),
        ("forward", "all_gather", "layers.0", "fsdp_shard"),
        ("forward", "all_gather", "layers.1", "fsdp_shard"),
        ("backward", "all_gather", "layers.1", "fsdp_shard"),
        ("backward", "reduce_scatter", "layers.1", "fsdp_shard"),
        ("backward", "all_gather", "layers.0", "fsdp_shard"),
        ("backward", "reduce_scatter", "layers.0", "fsdp_shard"),
        ("backward", "reduce_scatter", "root", "fsdp_shard"),
    ]
    scalars = [(None, "optimizer", "all_reduce", None, "dp")] * 2
    assert found == [(micro_batch, *row) for micro_batch in (0, 1) for row in one_pass] + scalars
    assert [r["sequence"] for r in collectives(records)] == list(range(len(found)))


def test_times_and_compute_spans_lie_inside_the_step_in_order() -> None:
    records, _ = run_ranks(trace_one_step, 2, "fsdp_config.dp_shard_size=2", "fsdp_config.comm_fusion=true")[0]
    (wall_s,) = (r["wall_s"] for r in records if r["record"] == "summary" and r["rank"] == 0)
    spans = [r for r in records if r["record"] == "compute" and r["rank"] == 0]
    for record in [*collectives(records), *spans]:
        assert 0 <= record["started_s"] <= record["ended_s"] <= wall_s
    assert {(span["unit"], span["phase"]) for span in spans} >= {
        (unit, phase) for unit in ("root", "layers.0", "layers.1") for phase in ("forward", "backward")
    } | {(None, "optimizer")}
    ends = [span["ended_s"] for span in spans]
    assert ends == sorted(ends)
    assert all(later["started_s"] >= end for end, later in zip(ends, spans[1:], strict=False))


def test_summary_adds_up_the_collectives() -> None:
    records, _ = run_ranks(trace_one_step, 2, "fsdp_config.dp_shard_size=2")[0]
    for rank in range(2):
        (summary,) = (r for r in records if r["record"] == "summary" and r["rank"] == rank)
        keys = ("kind", "axis", "unit", "phase")
        counts = Counter(tuple(r[key] for key in keys) for r in collectives(records, rank))
        assert {tuple(row[key] for key in keys): row["count"] for row in summary["totals"]} == counts
        assert sum(row["bytes"] for row in summary["totals"]) == sum(r["bytes"] for r in collectives(records, rank))


def trace_every_kind() -> Records:
    """One collective of each kind, by both families of operators; payloads of 8 fp32 elements a rank."""
    job = load_job(None, [*MODEL, "fsdp_config.dp_shard_size=2"])
    meshes = build_meshes(Topology.resolve(job, 2), torch.device("cpu"))
    log = Collected()
    trace = CommTrace([torch.nn.Linear(1, 1)], meshes, log)
    rank, mesh = dist.get_rank(), meshes.device_mesh["dp"]
    x = torch.ones(8)
    whole = DTensor.from_local(x, mesh, [Shard(0)])
    with trace.step(1):
        dist.all_gather([torch.empty(8), torch.empty(8)], x)
        dist.reduce_scatter(torch.empty(4), [torch.ones(4), torch.ones(4)])
        dist.all_reduce(x)
        dist.broadcast(x, src=0)
        dist.all_to_all_single(torch.empty(8), x)
        dist.send(x, dst=1) if rank == 0 else dist.recv(x, src=0)
        dist.barrier()
        whole.redistribute(placements=[Replicate()]).to_local().sum()
        whole.sum().full_tensor()
    return log.records


def test_every_kind_is_recorded_with_its_payload() -> None:
    records = run_ranks(trace_every_kind, 2)[0]
    found = [(r["kind"], r["bytes"], r["sent_bytes"]) for r in collectives(records)]
    assert found == [
        ("all_gather", 64, 32),
        ("reduce_scatter", 32, 16),
        ("all_reduce", 32, 32),
        ("broadcast", 32, 16),
        ("all_to_all", 32, 16),
        ("send", 32, 32),
        ("barrier", 0, 0),
        ("all_gather", 64, 32),
        ("all_reduce", 4, 4),
    ]
    assert [r["kind"] for r in collectives(records, rank=1)][5] == "recv"
    assert all(r["ended_s"] is not None for r in collectives(records))


def fail_in_a_step() -> tuple[Records, Records]:
    job = load_job(None, [*MODEL, "fsdp_config.dp_shard_size=2"])
    meshes = build_meshes(Topology.resolve(job, 2), torch.device("cpu"))
    log = Collected()
    trace = CommTrace([torch.nn.Linear(1, 1)], meshes, log)
    with pytest.raises(ZeroDivisionError), trace.step(1):  # noqa: PT012 (the collective comes before the failure)
        dist.all_reduce(torch.ones(1))
        raise ZeroDivisionError
    return log.records, log.failed


def test_a_failing_step_leaves_what_each_rank_had_issued() -> None:
    for written, failed in run_ranks(fail_in_a_step, 2):
        assert written == []
        assert [record["kind"] for record in collectives(failed, failed[0]["rank"])] == ["all_reduce"]


def strip_times(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if not key.endswith("_s")}


def test_a_traced_run_writes_one_file_and_trains_the_same(tmp_path: Path) -> None:
    for name in ("plain", "traced"):
        (tmp_path / name).mkdir()
        codes, said = train(
            tmp_path / name, "fsdp_config.dp_shard_size=2", f"debug.comm_trace={name == 'traced'}", world_size=2
        )
        assert codes == [0, 0], said
    same = ("loss", "grad_norm")
    plain, traced = (
        [{key: line[key] for key in same} for line in metrics(tmp_path / name)] for name in ("plain", "traced")
    )
    assert plain == traced
    assert not (tmp_path / "plain" / "run" / "comm_trace.jsonl").exists()
    records = read_jsonl(tmp_path / "traced" / "run" / "comm_trace.jsonl")
    summaries = [(r["step"], r["rank"]) for r in records if r["record"] == "summary"]
    assert summaries == [(step, rank) for step in (1, 2, 3, 4) for rank in (0, 1)]
    agreed = [r for r in records if r.get("phase") == "agree"]
    assert {(r["kind"], r["bytes"], r["unit"]) for r in agreed} == {("all_reduce", 16, None)}
    per_step = [
        [json.dumps(strip_times(r) | {"step": 0}) for r in collectives(records) if r["step"] == step]
        for step in (2, 3, 4)
    ]
    assert per_step[0] == per_step[1] == per_step[2]


def test_a_resumed_run_goes_on_with_its_file(tmp_path: Path) -> None:
    job = ("debug.comm_trace=true", "checkpoint.resume=auto")
    assert train(tmp_path, *job, "training.steps=2")[0] == [0]
    assert train(tmp_path, *job, "training.steps=4")[0] == [0]
    records = read_jsonl(tmp_path / "run" / "comm_trace.jsonl")
    assert [r["step"] for r in records if r["record"] == "summary"] == [1, 2, 3, 4]


def test_compiled_blocks_stay_compiled_and_their_gathers_are_seen() -> None:
    records, volumes = run_ranks(
        trace_compiled_step, 2, "fsdp_config.dp_shard_size=2", "compile.enabled=true", "compile.backend=aot_eager"
    )[0]
    assert measured(records, 0) == predicted(volumes)


def trace_compiled_step(*overrides: str) -> tuple[Records, tuple[CommVolume, ...]]:
    from torch._dynamo.utils import counters

    outcome = trace_one_step(*overrides)
    assert counters["frames"]["ok"] > 0, "the trace kept torch from compiling"
    return outcome
