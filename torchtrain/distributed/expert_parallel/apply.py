"""Carries out an expert-parallel plan: each rank keeps its experts, and a dispatcher reaches the others.

What FSDP is told of it are ``ExpertParallelPlan.placements``.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtrain.distributed.expert_parallel.plan import ExpertParallelPlan
from torchtrain.distributed.expert_parallel.token_split import SplitTokens
from torchtrain.nn.moe import MoE, TokenDispatcher


def apply_expert_parallel(
    model: nn.Module, plan: ExpertParallelPlan, dispatcher: TokenDispatcher, *, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh
) -> nn.Module:
    """Split the experts of ``model`` and install the dispatcher, in place.

    Args:
        model: The model, or one pipeline stage, that the plan was made for.
        plan: What ``plan_expert_parallel`` returned.
        dispatcher: Serves all layers.
        ep_mesh: The ep axis, of one root with the meshes that FSDP will use for experts.
        tp_mesh: The tp axis of the dense parameters.

    Collective: none; every rank keeps its part of what it has.
    """
    if plan.are_tokens_split:
        dispatcher = SplitTokens(dispatcher, tp_mesh.get_group())
    for layer in plan.layers:
        moe = cast(MoE, model.get_submodule(layer.fqn))
        for name, parameter in list(moe.experts.named_parameters()):
            setattr(moe.experts, name, _keep_own(parameter, ep_mesh))
        moe.experts.local_weight = _local
        moe.dispatcher = dispatcher
    return model


def _keep_own(parameter: nn.Parameter, ep_mesh: DeviceMesh) -> nn.Parameter:
    num_local = parameter.shape[0] // ep_mesh.size()
    # A copy, so that the whole stack is freed.
    own = parameter.detach().narrow(0, ep_mesh.get_local_rank() * num_local, num_local).clone()
    split = DTensor.from_local(own, ep_mesh, (Shard(0),), run_check=False)
    return nn.Parameter(split, requires_grad=parameter.requires_grad)


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight
