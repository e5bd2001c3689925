"""Gradients of parameters that every tp rank has whole but sees its own tokens or heads of: summed once a step.

Such a parameter is a plain tensor to autograd and to FSDP. Summing at the end rather than in each backward costs one
collective a step instead of one for each norm and micro-batch, and sums what is accumulated already, in its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.distributed.tensor_parallel.plan import TensorParallelPlan

# On the module that owns the parameters: the parameters themselves are replaced when FSDP wraps and materialises.
_MARK = "tp_partial_gradients"


def mark_partial_gradients(model: nn.Module, plan: TensorParallelPlan) -> None:
    """Note on the modules of ``model`` whose gradients ``sum_partial_gradients`` has to sum."""
    for parameter in plan.parameters:
        if parameter.is_gradient_partial:
            owner, _, name = parameter.fqn.rpartition(".")
            module = model.get_submodule(owner)
            setattr(module, _MARK, (*getattr(module, _MARK, ()), name))


@torch.no_grad()
def sum_partial_gradients(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Sum the marked gradients over tp, in place, after the last backward of a step and before the norm.

    Args:
        model: A model to which tensor parallelism was applied, wrapped by FSDP since or not; any other is left alone.
        tp_mesh: The tp axis.

    Collective: the ranks of ``tp_mesh``; one all-reduce per gradient dtype, none where nothing is marked.

    Numerics: in the gradients' dtype, fp32 where main gradients are.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in _marked_gradients(model):
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=tp_mesh.get_group())
        for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _marked_gradients(model: nn.Module) -> Iterator[Tensor]:
    """This rank's parts, as tensors that share memory with them; a tied parameter's once."""
    seen: set[int] = set()
    for module in model.modules():
        for name in getattr(module, _MARK, ()):
            parameter = module.get_parameter(name)
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
