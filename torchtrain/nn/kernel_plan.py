"""Chooses the backends of a model's ops as ``kernel_config`` says, and installs them.

Before anything is sharded: a plan reads sizes, which sharding changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torchtrain.config.kernels import KernelConfig
from torchtrain.errors import ConfigError, Fault
from torchtrain.kernels.gated_delta_rule import (
    CHUNK_GATED_DELTA_RULE,
    FUSED_RECURRENT_GATED_DELTA_RULE,
    DeltaRuleProblem,
)
from torchtrain.kernels.grouped_mm import GROUPED_MM, GroupedProblem
from torchtrain.kernels.plugins import included_ops, named_plugins
from torchtrain.kernels.registry import Op
from torchtrain.kernels.rms_norm import RMS_NORM, NormProblem
from torchtrain.nn.gated_delta_net import GatedDeltaNet, LocalDeltaNetCore
from torchtrain.nn.moe import RoutedExperts
from torchtrain.nn.rms_norm import RMSNorm

REGISTRY: dict[str, Op[Any, Any]] = {
    op.name: op for op in (GROUPED_MM, RMS_NORM, CHUNK_GATED_DELTA_RULE, FUSED_RECURRENT_GATED_DELTA_RULE)
}


@dataclass(frozen=True)
class KernelChoice:
    """The backend of one op."""

    op: str
    backend: str
    plugin: str
    """Who brings it."""


@dataclass(frozen=True)
class KernelPlan:
    """The backends of all ops that a model uses."""

    device: str
    dtype: str
    chunk_size: int
    choices: tuple[KernelChoice, ...]

    def describe(self) -> str:
        """Say it in a line."""
        return ", ".join(f"{choice.op}: {choice.backend}" for choice in self.choices)

    def to_mapping(self) -> dict[str, Any]:
        """The plan as plain data, for a file."""
        return {**asdict(self), "choices": {choice.op: choice.backend for choice in self.choices}}


def plan_kernels(model: nn.Module, config: KernelConfig, *, device: str, dtype: torch.dtype) -> KernelPlan:
    """Choose a backend for every op that the model uses. Pure; a meta-device model will do.

    Args:
        model: As the family builds it, whole.
        config: Section ``kernel_config``, its plugins installed.
        device: Type of the device that will compute.
        dtype: In which layers will compute.

    Raises:
        ConfigError: A plugin that the job names cannot compute what the model needs, or has nothing for it.
    """
    problems = _problems(model, device, dtype, config.chunk_size)
    taken = {op: plugin.name for plugin in named_plugins(config) for op in included_ops(config, plugin)}
    faults = [
        Fault(
            "kernel_config.name",
            config.name,
            f"asks {plugin.name} for {', '.join(included_ops(config, plugin))}, which no layer of this model uses",
            "leave it out",
        )
        for plugin in named_plugins(config)
        if not set(included_ops(config, plugin)) & set(problems)
    ]
    choices = []
    for name, problem in problems.items():
        op = REGISTRY[name]
        backend = op.backend(taken[name]) if name in taken else op.choose(problem)
        if name in taken and not backend.is_able(problem):
            rule = f"cannot compute {name} as {problem}; backends: {op.describe()}"
            faults.append(Fault("kernel_config.name", config.name, rule, "use auto, or change what it asks for"))
        choices.append(KernelChoice(name, backend.name, backend.plugin))
    if faults:
        raise ConfigError(faults)
    return KernelPlan(device, str(dtype).removeprefix("torch."), config.chunk_size, tuple(choices))


def apply_kernels(model: nn.Module, plan: KernelPlan) -> nn.Module:
    """Install a plan's backends in place.

    The grouped product is not installed: its backend is chosen call by call, as the plan chose it for whole layers.
    """
    chosen = {choice.op: REGISTRY[choice.op].backend(choice.backend).implementation for choice in plan.choices}
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.kernel = chosen["rms_norm"]
        elif isinstance(module, GatedDeltaNet):
            module.core = LocalDeltaNetCore(
                chosen["chunk_gated_delta_rule"],
                chosen["fused_recurrent_gated_delta_rule"],
                chunk_size=plan.chunk_size,
            )
    return model


def _problems(model: nn.Module, device: str, dtype: torch.dtype, chunk_size: int) -> Mapping[str, Any]:
    """What the model asks of each op that it uses; layers of a kind ask the same."""
    problems: dict[str, Any] = {}
    for module in model.modules():
        if isinstance(module, RMSNorm):
            problems["rms_norm"] = NormProblem(device, dtype)
        elif isinstance(module, RoutedExperts):
            num_experts, *sizes = module.gate_proj.shape
            problems["grouped_mm"] = GroupedProblem(device, dtype, num_experts, (sizes[0], sizes[1]))
        elif isinstance(module, GatedDeltaNet):
            problem = DeltaRuleProblem(device, dtype, module.config.key_head_dim, chunk_size)
            problems["chunk_gated_delta_rule"] = problems["fused_recurrent_gated_delta_rule"] = problem
    return dict(sorted(problems.items()))
