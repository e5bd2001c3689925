"""The plugin on real ranks: what it gathers, gives back, sums, stores, and sets up beforehand."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.registry import load_spec, resolve_architecture
from tests.distributed.stored_run import StoredRun
from tests.parity.harness import MODEL
from tests.parity.test_fsdpturbo import CUSTOM, IGNORED, MOE, plugin
from torchtrain.config.load import load_job
from torchtrain.distributed import gradient_norm
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_SCALAR, FP32_TENSOR
from torchtrain.trainer.run import Run, build_model


def build(*overrides: str) -> Any:
    job = load_job(None, [*MODEL, *MOE, *overrides])
    meshes = build_meshes(Topology.resolve(job, dist.get_world_size()), torch.device("cpu"))
    architecture = resolve_architecture("qwen3_moe", "debug", job.model.overrides)
    return build_model(Run(job, load_spec("qwen3_moe"), architecture, meshes, is_main=False)).module


def losses_of(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(101, (2, 17), generator=generator)
    return model(tokens[:, :-1], labels_BT=tokens[:, 1:])


def whole_weights(model: Any) -> list[Tensor]:
    experts = [block.mlp.experts for block in model.layers.values()]
    return [whole for module in experts for whole in module.local_weight.__self__._whole.values()]


def bytes_of(model: Any) -> int:
    return sum(whole.untyped_storage().size() for whole in whole_weights(model))


def measure_whole_weights(reshard_after_forward: bool) -> list[int]:
    keeping = f"fsdp_config.reshard_after_forward={str(reshard_after_forward).lower()}"
    model = build(*plugin(1), CUSTOM, "fsdp_config.dp_shard_size=2", keeping)
    sizes = []
    loss = losses_of(model).sum()
    sizes.append(bytes_of(model))
    loss.backward()
    sizes.append(bytes_of(model))
    with torch.no_grad():
        losses_of(model)
    sizes.append(bytes_of(model))
    assert all(whole.grad is None for whole in whole_weights(model))
    for block in model.layers.values():
        for weight in block.mlp.experts.parameters():
            assert isinstance(weight.grad, DTensor)
            assert weight.grad.placements == weight.placements
            assert weight.to_local().numel() * 2 == weight.numel()
    return sizes


def test_custom_gives_whole_weights_back_between_passes() -> None:
    assert run_ranks(measure_whole_weights, 2, True) == [[0, 0, 0]] * 2
    # Two layers of three matrices of 4 x 12 x 32 in fp32, and only for a backward: an evaluation has none.
    assert run_ranks(measure_whole_weights, 2, False) == [[2 * 3 * 4 * 12 * 32 * 4, 0, 0]] * 2


def step_between_evaluations(*overrides: str) -> list[Tensor]:
    """Losses without gradients before and after a step of plain gradient descent."""
    model = build(*plugin(1), "fsdp_config.dp_shard_size=2", "fsdp_config.reshard_after_forward=false", *overrides)
    seen = []
    for _ in range(2):
        with torch.no_grad():
            seen.append(losses_of(model))
        losses_of(model).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    return seen


def both_ways_to_step() -> tuple[list[Tensor], list[Tensor]]:
    return step_between_evaluations(), step_between_evaluations(CUSTOM)


def test_an_evaluation_between_steps_sees_the_weights_of_the_step_before_it() -> None:
    for native, custom in run_ranks(both_ways_to_step, 2):
        assert not native[0].equal(native[1])
        assert all(ours.equal(theirs) for ours, theirs in zip(custom, native, strict=True))


def where_and_as_what(*overrides: str) -> tuple[set[torch.dtype], set[str], set[str]]:
    """Dtypes of parameters and gradients; the axes that experts lie on, and those of all else."""
    model = build("model.init_dtype=bfloat16", "fsdp_config.dp_shard_size=2", *overrides)
    losses_of(model).sum().backward()
    axes: dict[bool, set[str]] = {True: set(), False: set()}
    for fqn, parameter in model.named_parameters():
        axes[".experts." in fqn] |= set(parameter.device_mesh.mesh_dim_names)
    return {tensor.dtype for weight in model.parameters() for tensor in (weight, weight.grad)}, axes[True], axes[False]


@pytest.mark.parametrize("words", [(), (CUSTOM,)], ids=["native", "custom"])
def test_each_parameter_is_stored_on_its_own_mesh_as_the_model_section_says(words: tuple[str, ...]) -> None:
    for dtypes, experts, others in run_ranks(where_and_as_what, 2, *plugin(2), *words):
        assert dtypes == {torch.bfloat16}
        assert experts == {"efsdp", "ep"}
        assert others == {"fsdp_shard"}


def collectives_of_the_norm(*overrides: str) -> tuple[Counter[str], Counter[str]]:
    """All-reduces by group: of the start, and of the norm of a step."""
    seen: Counter[str] = Counter()
    all_reduce = dist.all_reduce

    def count(tensor: Tensor, *args: Any, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        if tensor.ndim == 0:
            seen[group.group_name] += 1
        return all_reduce(tensor, *args, group=group, **kwargs)

    gradient_norm.dist.all_reduce = count
    model = build(*overrides)
    at_start = seen.copy()
    losses_of(model).sum().backward()
    seen.clear()
    gradient_norm.global_gradient_norm(model.parameters(), torch.device("cpu"))
    return at_start, seen


def test_the_collectives_of_the_norm_have_run_before_the_first_step() -> None:
    for at_start, in_step in run_ranks(collectives_of_the_norm, 2, *plugin(2), "fsdp_config.dp_shard_size=2"):
        assert at_start == in_step
        assert sum(in_step.values()) > 0


def gradients_of_ignored(*overrides: str) -> dict[str, Tensor]:
    model = build(*overrides)
    for _ in range(2):
        losses_of(model).sum().backward()
    return {fqn: p.grad for fqn, p in model.named_parameters() if not isinstance(p, DTensor)}


def test_ignored_parameters_stay_plain_and_every_rank_has_the_sum_of_all_gradients() -> None:
    first, second = run_ranks(gradients_of_ignored, 2, *plugin(2), "fsdp_config.dp_shard_size=2", IGNORED)
    assert set(first) == set(second)
    assert {fqn.split(".")[0] for fqn in first} == {"layers", "norm"}
    assert all(first[fqn].equal(second[fqn]) for fqn in first)


MUON = (*MOE, "optimizer._target_=torchtrain.optim.muon.Muon", "training.micro_batch_size=2")
SHARDED = (*plugin(2), "fsdp_config.dp_shard_size=4")
Stop = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]


def stop_at(run: StoredRun) -> Stop:
    """Whole tensors as they are and after one more step, which is not saved, and its loss and norm."""
    run.save()
    run.checkpointer.wait()
    return run.whole_tensors(), run.train(1), run.whole_tensors()


def travel_between_implementations(folder: Path) -> list[Stop]:
    run = StoredRun(*MUON, *SHARDED, CUSTOM, folder=folder / "0")
    run.train(2)
    stops = [stop_at(run)]
    for index, words in enumerate(((), (CUSTOM,))):
        source = str(folder / str(index) / "step_00000002")
        run = StoredRun(*MUON, *SHARDED, *words, folder=folder / str(index + 1), resume=source)
        run.resume()
        stops.append(stop_at(run))
    return stops


def resume_alone(source: Path) -> Stop:
    run = StoredRun(*MUON, resume=str(source))
    run.resume()
    return run.whole_tensors(), run.train(1), run.whole_tensors()


def test_custom_stores_and_resumes_muon_bit_for_bit_as_native_and_as_one_rank(tmp_path: Path) -> None:
    by_rank = run_ranks(travel_between_implementations, 4, tmp_path)
    stored, scalars, stepped = by_rank[0][0]
    assert any(name.endswith("experts.gate_proj.momentum_buffer") for name in stored)
    for resumed, theirs, afterwards in itertools.chain.from_iterable(by_rank):
        assert theirs == scalars
        assert resumed.keys() == stored.keys()
        assert all(tensor.equal(stored[name]) for name, tensor in resumed.items())
        assert all(tensor.equal(stepped[name]) for name, tensor in afterwards.items())
    ((resumed, theirs, afterwards),) = run_ranks(resume_alone, 1, tmp_path / "0" / "step_00000002")
    assert all(tensor.equal(stored[name]) for name, tensor in resumed.items())
    assert all(relative_error(a, b) <= FP32_SCALAR for a, b in zip(theirs, scalars, strict=True))
    assert all(relative_error(tensor, stepped[name]) <= FP32_TENSOR for name, tensor in afterwards.items())
