"""Checkpoints between parallel topologies: what tensor, context and pipeline ranks save, any other topology loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.stored_run import StoredRun
from torchtrain.testing.ranks import run_ranks

MODEL = (
    "model.overrides={vocab_size: 101, hidden_size: 32, intermediate_size: 36, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}",
    "training.micro_batch_size=1",
)
FSDP_TP = ("fsdp_config.dp_shard_size=2", "accelerator.tp_size=2", "accelerator.sequence_parallel=true")
PP_CP = (
    "fsdp_config.dp_shard_size=2",
    "accelerator.pp_size=2",
    "accelerator.pp_schedule=Interleaved1F1B",
    "accelerator.cp_size=2",
)
HSDP = ("fsdp_config.dp_shard_size=2", "fsdp_config.comm_fusion=true")
NUM_STEPS = 2
Stop = tuple[dict[str, Tensor], list[float]]


def begin(overrides: tuple[str, ...], folder: Path) -> Stop:
    """Train, save, and train one step more."""
    run = StoredRun(*MODEL, *overrides, folder=folder)
    run.train(NUM_STEPS)
    run.save()
    run.checkpointer.wait()
    return run.whole_tensors(), run.train(1)


def pass_on(overrides: tuple[str, ...], source: Path, folder: Path) -> Stop:
    """Load, save elsewhere, and train one step more."""
    run = StoredRun(*MODEL, *overrides, folder=folder, resume=str(source))
    run.resume()
    tensors = run.whole_tensors()
    run.save()
    run.checkpointer.wait()
    return tensors, run.train(1)


def travel(target: str, legs: Sequence[tuple[tuple[str, ...], Path | None, Path]]) -> list[Stop]:
    """Several stops on the same ranks; the one without a source is where the state begins."""
    return [
        begin((*overrides, target), folder)
        if source is None
        else pass_on((*overrides, target), source / f"step_{NUM_STEPS:08d}", folder)
        for overrides, source, folder in legs
    ]


@pytest.mark.parametrize("optimizer", ["torch.optim.AdamW", "torchtrain.optim.muon.Muon"])
def test_a_state_travels_through_every_topology_and_back_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    target = f"optimizer._target_={optimizer}"
    folders = [tmp_path / str(stop) for stop in range(5)]
    there = run_ranks(travel, 4, target, [(FSDP_TP, None, folders[0]), (PP_CP, folders[0], folders[1])])
    alone = run_ranks(travel, 1, target, [((), folders[1], folders[2])])
    back = run_ranks(travel, 4, target, [(HSDP, folders[2], folders[3]), (FSDP_TP, folders[3], folders[4])])
    (expected, next_step), _ = there[0]
    for name, ranks in (("pp x cp", [r[1] for r in there]), ("one rank", [r[0] for r in alone])):
        assert_arrived(ranks, expected, name)
    for leg, name in enumerate(("hsdp", "fsdp x tp")):
        assert_arrived([stops[leg] for stops in back], expected, name)
    assert back[0][1][1] == next_step


def assert_arrived(ranks: Sequence[Stop], expected: dict[str, Tensor], where: str) -> None:
    everything = {name: tensor for tensors, _ in ranks for name, tensor in tensors.items()}
    assert everything.keys() == expected.keys(), where
    for tensors, _ in ranks:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), (where, name)


def count_steps(overrides: tuple[str, ...], folder: Path, resume: str | None) -> dict[str, int]:
    """Train with an optimizer that keeps plain numbers; returns them by fqn."""
    target = "tests.distributed.test_checkpoint_topology.CountingSGD"
    optimizer = (
        f"optimizer._target_={target}",
        "trusted_targets=[tests]",
        "optimizer.fused=null",
        "optimizer.eps=1e-8",
    )
    run = StoredRun(*MODEL, *optimizer, *overrides, folder=folder, resume=resume)
    if resume is None:
        run.train(NUM_STEPS)
        run.save()
        run.checkpointer.wait()
    else:
        run.resume()
    return {fqn: run.optimizer.state[parameter]["count"] for fqn, parameter in run.model.named_parameters()}


def test_numbers_of_every_stage_are_saved(tmp_path: Path) -> None:
    run_ranks(count_steps, 2, ("accelerator.pp_size=2",), tmp_path, None)
    (counts,) = run_ranks(count_steps, 1, (), tmp_path / "later", str(tmp_path / f"step_{NUM_STEPS:08d}"))
    assert set(counts.values()) == {NUM_STEPS}
