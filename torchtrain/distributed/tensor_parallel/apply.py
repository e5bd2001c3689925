"""Carries out a tensor-parallel plan with ``torch.distributed.tensor.parallel``.

Between modules everything is a plain local tensor; only a split linear layer or embedding sees DTensors. So residual
stream, norms, rotation and attention run at plain tensors' speed, and whatever comes after sees one kind of tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from torchtrain.distributed.tensor_parallel.partial_gradients import mark_partial_gradients
from torchtrain.distributed.tensor_parallel.plan import Style, TensorParallelPlan

_SEQUENCE_DIM = 1


def apply_tensor_parallel(model: nn.Module, plan: TensorParallelPlan, tp_mesh: DeviceMesh) -> nn.Module:
    """Split the parameters of ``model`` and prepare the inputs and outputs of its modules, in place.

    A tied parameter stays one parameter: torch makes a DTensor of each alias, so ties are remembered and restored.

    Args:
        model: The model, or one pipeline stage, that the plan was made for.
        plan: What ``plan_tensor_parallel`` returned.
        tp_mesh: The tp axis, of one root with the meshes that FSDP will use.

    Collective: the ranks of ``tp_mesh``, where the model has values; none on meta.
    """
    stream: Placement = Shard(_SEQUENCE_DIM) if plan.is_sequence_parallel else Replicate()
    ties: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(fqn)
    for planned in plan.modules:
        module = model.get_submodule(planned.fqn)
        match planned.style:
            case Style.WHOLE_INPUT:
                _bring_first_input_whole(module, tp_mesh, stream)
            case Style.TOKENWISE | Style.HEAD_NORM | Style.ELSEWHERE:
                pass
            case style:
                parallelize_module(module, tp_mesh, _torch_style(style, stream))
        if planned.style is Style.EMBEDDING:
            module.register_forward_hook(_wait)
    mark_partial_gradients(model, plan)
    for first, *others in ties.values():
        for fqn in others:
            owner, _, name = fqn.rpartition(".")
            setattr(model.get_submodule(owner), name, model.get_parameter(first))
    return model


def _wait(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Wait for the collective that torch's style leaves under way, without copying what it brings.

    A block may be compiled, and torch 2.13 loses the gradient of an unfinished collective that enters a compiled
    region: the embedding would learn nothing.
    """
    return _Wait.apply(output) if hasattr(output, "wait") else output


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Any) -> Tensor:
        return output.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _torch_style(style: Style, stream: Placement) -> ParallelStyle:
    """The torch style of a module between which and the next the residual stream is laid out as ``stream``."""
    match style:
        case Style.EMBEDDING:
            return RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        case Style.COLUMN:
            return ColwiseParallel()
        case Style.ROW:
            return RowwiseParallel(output_layouts=stream)
        case Style.HEAD:
            return ColwiseParallel(input_layouts=stream, output_layouts=Replicate())
        case _:
            raise ValueError(f"{style} is not a style of torch's")


def _bring_first_input_whole(module: nn.Module, tp_mesh: DeviceMesh, stream: Placement) -> None:
    """Make the first input a whole DTensor; other inputs, however many, are left alone.

    One gather for all columns that read it, and in backward one reduction of the sum of their gradients.
    """

    def bring_whole(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        first, *others = inputs
        whole = DTensor.from_local(first, tp_mesh, (stream,), run_check=False).redistribute(placements=(Replicate(),))
        return (whole, *others)

    module.register_forward_pre_hook(bring_whole)
