"""Which optimizers of ``torch.optim`` step sharded parameters as they step whole ones, and which are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtrain.config.optimization import OptimizerConfig
from torchtrain.errors import ConfigError
from torchtrain.optim.build import build_optimizer
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import FP32_TENSOR

WORKING = ("SGD", "Adagrad", "RMSprop", "NAdam", "Adam", "AdamW", "Adadelta", "ASGD", "RAdam", "Adamax")
FUSED = ("SGD", "Adagrad", "Adam", "AdamW")
CPU = torch.device("cpu")


def fresh_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def weights_after_steps(model: nn.Module, name: str) -> list[torch.Tensor]:
    config = OptimizerConfig(target=f"torch.optim.{name}", lr=1e-2)
    optimizer = build_optimizer(model, config, device=CPU)
    for step in range(3):
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def shard(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def step_on_shards() -> dict[str, list[torch.Tensor]]:
    return {name: weights_after_steps(shard(fresh_model()), name) for name in WORKING}


def refuse_the_fused_kernel() -> list[str]:
    model = shard(fresh_model())
    refused = []
    for name in FUSED:
        try:
            build_optimizer(model, OptimizerConfig(target=f"torch.optim.{name}", fused=True), device=CPU)
        except ConfigError as error:
            refused += [f"{name}: {fault.fix}" for fault in error.faults]
    return refused


def test_two_shards_step_as_whole_parameters_do():
    expected = {name: weights_after_steps(fresh_model(), name) for name in WORKING}
    for found in run_ranks(step_on_shards, 2):
        for name in WORKING:
            errors = [relative_error(mine, whole) for mine, whole in zip(found[name], expected[name], strict=True)]
            assert max(errors) <= FP32_TENSOR, name


def test_a_fused_kernel_that_takes_no_shards_is_refused_on_them():
    way_out = "leave it out, or use torch.optim.AdamW or torch.optim.Adam"
    assert run_ranks(refuse_the_fused_kernel, 2) == [[f"SGD: {way_out}", f"Adagrad: {way_out}"]] * 2


@pytest.mark.parametrize("name", FUSED)
def test_null_takes_the_fused_kernel_where_no_parameter_is_sharded(name: str):
    config = OptimizerConfig(target=f"torch.optim.{name}")
    assert build_optimizer(fresh_model(), config, device=CPU).defaults["fused"] is True


def test_null_leaves_the_fused_kernel_to_an_option_that_excludes_it():
    config = OptimizerConfig(options={"foreach": True})
    assert build_optimizer(fresh_model(), config, device=CPU).defaults["fused"] is False
