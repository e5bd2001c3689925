"""What the trace of a step tells of tokens on their way: which products of experts each exchange spans."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from models.registry import load_spec, resolve_architecture
from tests.distributed.test_comm_trace import Collected, Records, collectives
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from tests.parity.test_fsdpturbo import MOE
from torchtrain.config.load import load_job
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.optim.build import build_optimizer
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

LAYER = "layers.1.mlp.experts"


def trace_one_step(dispatcher: str) -> Records:
    """Records of this rank: one micro-batch through a model of two layers with experts."""
    words = ("accelerator.ep_size=2", f"dist_config.ep_dispatcher={dispatcher}", "training.micro_batch_size=4")
    job = load_job(None, [*MODEL, *MOE, *words, "fsdp_config.dp_shard_size=2"])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), torch.device("cpu"))
    architecture = resolve_architecture("qwen3_moe", "debug", job.model.overrides)
    rank_model = build_model(Run(job, load_spec("qwen3_moe"), architecture, meshes, is_main=False))
    optimizer = build_optimizer(rank_model.module, job.optimizer, device=meshes.device)
    step = build_train_step(job, rank_model, optimizer, meshes)
    log = Collected()
    trace = CommTrace(rank_model.chunks, meshes, log)
    whole = make_global_batch(0, 8, 16)
    batches = split_batch(whole, meshes.dp_rank, 2, 4)
    with trace.step(1):
        step.run(1, batches, whole.num_valid_tokens())
    return log.records


def trace_all(names: tuple[str, ...]) -> dict[str, Records]:
    return {name: trace_one_step(name) for name in names}


def of_layer(records: Records, rank: int, phase: str) -> tuple[dict[str, dict[str, Any]], Records]:
    """Exchanges of one layer's pass by name, and its spans of products, in order."""
    exchanges = [r for r in collectives(records, rank) if r["axis"] == "ep" and r["unit"] == LAYER]
    spans = [r for r in records if r["record"] == "experts" and r["rank"] == rank and r["unit"] == LAYER]
    by_name = {r["exchange"]: r for r in exchanges if r["phase"] == phase}
    return by_name, [span for span in spans if span["phase"] == phase]


def spans_it(exchange: dict[str, Any], products: dict[str, Any]) -> bool:
    """Begun before the products, and not waited for until they were done."""
    return exchange["started_s"] <= products["started_s"] and products["ended_s"] <= exchange["waited_s"]


def is_apart(exchange: dict[str, Any], products: dict[str, Any]) -> bool:
    return exchange["ended_s"] <= products["started_s"] or products["ended_s"] <= exchange["started_s"]


def test_the_trace_shows_each_slice_of_domino_travelling_while_the_other_is_computed() -> None:
    by_dispatcher = run_ranks(trace_all, 2, ("eager", "domino"))[0]
    for rank in range(2):
        exchanges, spans = of_layer(by_dispatcher["domino"], rank, "forward")
        assert list(exchanges) == ["counts", *(f"slice {i} to {end}" for end in ("experts", "tokens") for i in (0, 1))]
        first, second = spans
        assert spans_it(exchanges["slice 1 to experts"], first)
        assert spans_it(exchanges["slice 0 to tokens"], second)

        exchanges, spans = of_layer(by_dispatcher["domino"], rank, "backward")
        assert list(exchanges) == [f"slice {i} to {end}, back" for end in ("tokens", "experts") for i in (1, 0)]
        first, second = spans
        assert spans_it(exchanges["slice 0 to tokens, back"], first)
        assert spans_it(exchanges["slice 1 to experts, back"], second)

        for phase, names in {
            "forward": ["counts", "to experts", "to tokens"],
            "backward": ["to tokens, back", "to experts, back"],
        }.items():
            exchanges, (products,) = of_layer(by_dispatcher["eager"], rank, phase)
            assert list(exchanges) == names
            assert all(is_apart(exchange, products) for exchange in exchanges.values())
            assert not any(spans_it(exchange, products) for exchange in exchanges.values())
