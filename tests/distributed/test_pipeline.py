"""A pipeline on real ranks beyond gradients: first weights, evaluation, memory, bytes, failure."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.registry import load_spec, resolve_architecture
from tests.distributed.stored_run import StoredRun
from tests.distributed.test_comm_trace import Collected, collectives, measured, predicted
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from tests.parity.test_pipeline import MODEL as FIVE_LAYERS
from tests.parity.test_pipeline import ONE_BY_ONE, PP_2
from torchtrain.config.load import load_job
from torchtrain.config.parallel import PpSchedule
from torchtrain.data.tokenizer import BytesTokenizer
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.comm_volume import plan_comm_volume
from torchtrain.distributed.fsdp2.manager import FSDP2Manager
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.pipeline_parallel import schedule
from torchtrain.distributed.pipeline_parallel.stage_plan import SPLIT_BACKWARD, num_stages, rank_of_stage
from torchtrain.distributed.pipeline_volume import plan_pipeline_volume
from torchtrain.distributed.topology import Topology
from torchtrain.errors import NonFiniteError
from torchtrain.optim.build import build_optimizer
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch, whole_tensor
from torchtrain.testing.tolerances import EXACT, FP32_SCALAR, FP32_TENSOR
from torchtrain.trainer.evaluation import evaluate
from torchtrain.trainer.forward_backward import build_forward_backward
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.run import Run, build_model
from torchtrain.trainer.sampling import sample

SHARD_2 = "fsdp_config.dp_shard_size=2"


class Parts:
    """What a job is made of on this rank."""

    def __init__(self, *overrides: str) -> None:
        self.job = load_job(None, [*MODEL, FIVE_LAYERS, *overrides])
        self.topology = Topology.resolve(self.job, dist.get_world_size())
        self.meshes = build_meshes(self.topology, torch.device("cpu"))
        self.spec = load_spec("llama")
        self.architecture = resolve_architecture("llama", "debug", self.job.model.overrides)
        self.model = build_model(Run(self.job, self.spec, self.architecture, self.meshes, is_main=False))
        self.optimizer = build_optimizer(
            self.model.module,
            self.job.optimizer,
            device=self.meshes.device,
            is_stage=self.topology.pp_size > 1,
        )
        self.step = build_train_step(self.job, self.model, self.optimizer, self.meshes)

    def train(self, step: int) -> list[float]:
        training = self.job.training
        whole = make_global_batch(step, training.global_batch_size, training.seq_len)
        shares = split_batch(whole, self.meshes.dp_rank, self.topology.dp_size, training.micro_batch_size)
        result = self.step.run(step, shares, whole.num_valid_tokens())
        return [result.loss, result.grad_norm]


def first_weights(overrides: Sequence[str]) -> dict[str, Tensor]:
    model = Parts(*overrides).model.module
    return {fqn: whole_tensor(parameter.detach()) for fqn, parameter in model.named_parameters()}


def test_first_weights_are_those_of_one_rank_bit_for_bit() -> None:
    (expected,) = run_ranks(first_weights, 1, ())
    by_rank = run_ranks(first_weights, 4, (PP_2, SHARD_2, "accelerator.pp_schedule=Interleaved1F1B", ONE_BY_ONE))
    assert {fqn for weights in by_rank for fqn in weights} == expected.keys()
    assert not by_rank[0].keys() & by_rank[2].keys()
    for weights in by_rank:
        for fqn, weight in weights.items():
            assert relative_error(weight, expected[fqn]) <= EXACT, fqn


def train_and_look(overrides: Sequence[str], *, looks: bool) -> tuple[list[float], list[float], Tensor]:
    """Train a step, evaluate 3 sequences and score a prompt, train another step."""
    parts = Parts(*overrides)
    precision = ComputePrecision(
        parts.job.fsdp_config.mix_precision, parts.meshes.device, has_fsdp_domain=parts.topology.has_fsdp_domain
    )
    loop = build_forward_backward(
        parts.job,
        parts.model,
        task=PretrainTask(),
        meshes=parts.meshes,
        precision=precision,
        vocab_size=parts.architecture.vocab_size,
    )
    scalars, totals, logits = parts.train(1), [], torch.empty(0)
    if looks:
        batch = make_global_batch(7, 4, parts.job.training.seq_len)
        shares = split_batch(batch, parts.meshes.dp_rank, parts.topology.dp_size, 4 // parts.topology.dp_size)
        report = evaluate(
            1,
            parts.model.module,
            loop,
            shares,
            meshes=parts.meshes,
            source_names=("made_up",),
            should_stop=lambda: False,
        )
        assert report is not None
        totals = [report.loss, float(report.tokens)]
        # A save may come next, and a stage that is not the whole model does not shard itself when asked for its state.
        expected = {DTensor if parts.topology.has_fsdp_domain else Tensor}
        assert {type(parameter.data) for parameter in parts.model.module.parameters()} == expected
        logits = loop.next_token_logits([5, 17, 3, 40, 8])
        sample(
            parts.model.module,
            loop,
            BytesTokenizer(),
            "ab",
            add_bos=False,
            num_tokens=2,
            temperature=0.0,
            max_context=8,
            seed=0,
            device=parts.meshes.device,
            should_stop=lambda: False,
        )
        assert {type(parameter.data) for parameter in parts.model.module.parameters()} == expected
    return scalars + parts.train(2), totals, logits


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ("accelerator.pp_schedule=1F1B",)),
        (2, ("accelerator.pp_schedule=DualPipeV",)),
        (4, (SHARD_2, "accelerator.pp_schedule=InterleavedZeroBubble")),
        (2, (SHARD_2, "accelerator.pp_size=1", "fsdp_config.reshard_after_forward=false")),
    ],
    ids=["row", "v", "loops_fsdp", "without_a_pipeline"],
)
def test_evaluation_and_samples_equal_one_rank_and_leave_training_alone(
    world_size: int, overrides: tuple[str, ...]
) -> None:
    ((_, totals, logits),) = run_ranks(train_and_look, 1, (ONE_BY_ONE,), looks=True)
    looked = run_ranks(train_and_look, world_size, (PP_2, ONE_BY_ONE, *overrides), looks=True)
    for scalars, ours, ours_logits in looked:
        assert scalars == looked[0][0]
        for mine, theirs in zip(ours, totals, strict=True):
            assert relative_error(mine, theirs) <= FP32_SCALAR
        assert relative_error(ours_logits, logits) <= FP32_TENSOR
    untouched = run_ranks(train_and_look, world_size, (PP_2, ONE_BY_ONE, *overrides), looks=False)
    assert looked[0][0] == untouched[0][0]


OVERRIDDEN = (
    "forward_maybe_with_nosync",
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
    "perform_reduce_grad",
)
INPUTS_ONLY = "backward_one_chunk for inputs only"


def count_entries(overrides: Sequence[str]) -> dict[str, dict[int, int]]:
    """How often torch enters each method of a stage that we override, by stage, in one step."""
    entries: dict[str, dict[int, int]] = {name: {} for name in (*OVERRIDDEN, INPUTS_ONLY)}

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_split = name == "backward_one_chunk" and not kwargs.get("full_backward", True)
            for counter in (name, INPUTS_ONLY) if is_split else (name,):
                entries[counter][self.stage_index] = entries[counter].get(self.stage_index, 0) + 1
            return original(self, *args, **kwargs)

        return enter

    for name in OVERRIDDEN:
        # Where torch calls it no more, ours is a method that nobody enters, under whatever name.
        setattr(schedule._Stage, name, counted(name, vars(schedule._Stage)[name]))
    Parts(PP_2, *overrides).train(1)
    return entries


@pytest.mark.parametrize("name", get_args(PpSchedule))
def test_torch_enters_every_method_that_a_stage_overrides(name: PpSchedule) -> None:
    """A name that torch gives up would silently take autocast, labels or the reduction with it."""
    batch = "training.global_batch_size=4"
    by_rank = run_ranks(count_entries, 2, (ONE_BY_ONE, batch, f"accelerator.pp_schedule={name}"))
    for rank, entries in enumerate(by_rank):
        mine = [stage for stage in range(num_stages(name, 2)) if rank_of_stage(name, 2, stage) == rank]
        for method in ("forward_maybe_with_nosync", "forward_one_chunk", "backward_one_chunk"):
            assert entries[method] == dict.fromkeys(mine, 4), method
        assert entries["perform_reduce_grad"] == dict.fromkeys(mine, 1)
        assert entries["backward_weight_one_chunk"] == entries[INPUTS_ONLY]
        assert set(entries[INPUTS_ONLY]) == (set(mine) if name in SPLIT_BACKWARD else set())


class SavedForBackward:
    """Counts the bytes that autograd keeps, and the most it ever kept."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        def unpack() -> Tensor:
            return tensor

        size = tensor.numel() * tensor.element_size()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(unpack, self._forget, size)
        return unpack

    def _forget(self, size: int) -> None:
        self.now -= size


def peak_saved_bytes(overrides: Sequence[str]) -> int:
    parts, saved = Parts(PP_2, ONE_BY_ONE, *overrides), SavedForBackward()
    parts.train(1)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda unpack: unpack()):
        parts.train(2)
    return saved.peak


def test_1f1b_keeps_as_many_micro_batches_as_stages_and_gpipe_all() -> None:
    peaks = {
        (schedule, batch): run_ranks(
            peak_saved_bytes, 2, [f"accelerator.pp_schedule={schedule}", f"training.global_batch_size={batch}"]
        )
        for schedule in ("1F1B", "GPipe")
        for batch in (4, 8)
    }
    for rank, in_flight in ((0, 2), (1, 1)):
        one = peaks["1F1B", 4][rank] / in_flight
        assert peaks["1F1B", 8][rank] == peaks["1F1B", 4][rank]
        assert peaks["GPipe", 4][rank] == pytest.approx(4 * one, rel=0.01)
        assert peaks["GPipe", 8][rank] == pytest.approx(8 * one, rel=0.01)


def trace_a_step(overrides: Sequence[str]) -> tuple[list[dict[str, Any]], dict[Any, Any], dict[Any, Any]]:
    """Records of all ranks (on rank 0) of the second step, and this rank's volumes by the formulas."""
    parts, log = Parts(*overrides), Collected()
    trace = CommTrace(parts.model.chunks, parts.meshes, log)
    for step in (1, 2):
        with trace.step(step):
            parts.train(step)
    job, training = parts.job, parts.job.training
    crossing = plan_pipeline_volume(
        job.accelerator.pp_schedule,
        pp_size=2,
        pp_rank=parts.meshes.pp_rank,
        num_micro_batches=training.global_batch_size // parts.topology.dp_size,
        micro_batch_bytes=training.seq_len * parts.architecture.hidden_size * 4,
    )
    sharded: dict[Any, Any] = {}
    if parts.topology.has_fsdp_domain:
        manager = FSDP2Manager(job.fsdp_config, parts.meshes)
        with torch.device("meta"):
            whole = manager.plan(parts.spec.build(parts.architecture))
        once = replace(job.fsdp_config, requires_grad_sync=False, reshard_after_backward=False)
        (chunk,) = parts.model.chunks
        plan = manager.plan_stage(whole, chunk)
        sharded = predicted(plan_comm_volume(plan, once, storage_dtype="float32", num_micro_batches=8))
    moved = {volume.kind: (volume.count, volume.bytes, volume.sent_bytes) for volume in crossing}
    return [record for record in log.records if record["step"] == 2], moved, sharded


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_bytes_between_stages_are_the_formulas(schedule: str) -> None:
    results = run_ranks(trace_a_step, 2, (PP_2, ONE_BY_ONE, f"accelerator.pp_schedule={schedule}"))
    records = results[0][0]
    for rank, (_, moved, _) in enumerate(results):
        crossing = [record for record in collectives(records, rank) if record["kind"] in ("send", "recv")]
        assert {(record["axis"], record["phase"], record["unit"]) for record in crossing} == {("pp", "pipeline", None)}
        for kind in ("send", "recv"):
            found = [record for record in crossing if record["kind"] == kind]
            totals = (len(found), sum(r["bytes"] for r in found), sum(r["sent_bytes"] for r in found))
            assert totals == moved[kind], (rank, kind)


def test_units_of_a_stage_are_gathered_and_reduced_once_a_step() -> None:
    results = run_ranks(trace_a_step, 4, (PP_2, SHARD_2, ONE_BY_ONE, "fsdp_config.comm_fusion=true"))
    records = results[0][0]
    for rank, (_, _, sharded) in enumerate(results):
        assert measured(records, rank) == sharded
        reductions = [r for r in collectives(records, rank) if r["kind"] == "reduce_scatter"]
        assert {r["phase"] for r in reductions} == {"backward"}
    assert {"dp", "pp"} <= {record["axis"] for record in collectives(records) if record["phase"] == "optimizer"}
    spans = [record for record in records if record["record"] == "compute" and record["unit"] == "layers.0"]
    for phase in ("forward", "backward"):
        assert {span["micro_batch"] for span in spans if span["phase"] == phase} == {0, 1, 2, 3}


def break_a_weight(overrides: Sequence[str]) -> str:
    run = StoredRun(*overrides)
    run.train(1)
    if run.meshes.pp_rank == 0:
        with torch.no_grad():
            next(run.model.parameters()).fill_(float("nan"))
    with pytest.raises(NonFiniteError) as caught:
        run.train(1)
    return str(caught.value)


def test_a_loss_that_is_not_finite_stops_every_stage_with_one_message() -> None:
    said = run_ranks(break_a_weight, 2, (PP_2, ONE_BY_ONE))
    assert said[0] == said[1]
    assert "not finite on ranks [0, 1]" in said[0]
