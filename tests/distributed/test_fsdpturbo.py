"""The plugin on real ranks: what it gathers, gives back, sums, stores, and sets up beforehand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.registry import load_spec, resolve_architecture
from tests.parity.harness import MODEL
from tests.parity.test_fsdpturbo import CUSTOM, IGNORED, MOE, plugin
from torchtrain.config.load import load_job
from torchtrain.distributed import gradient_norm
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.testing.ranks import run_ranks
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


def measure_whole_weights() -> list[int]:
    model = build(*plugin(1), CUSTOM, "fsdp_config.dp_shard_size=2")
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
    assert run_ranks(measure_whole_weights, 2) == [[0, 0, 0]] * 2


def stored_dtypes(*overrides: str) -> set[torch.dtype]:
    model = build("model.init_dtype=bfloat16", "fsdp_config.dp_shard_size=2", *overrides)
    losses_of(model).sum().backward()
    return {tensor.dtype for weight in model.parameters() for tensor in (weight, weight.grad)}


@pytest.mark.parametrize("words", [(), (CUSTOM,)], ids=["native", "custom"])
def test_parameters_and_gradients_are_stored_as_the_model_section_says(words: tuple[str, ...]) -> None:
    assert run_ranks(stored_dtypes, 2, *plugin(2), *words) == [{torch.bfloat16}] * 2


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
