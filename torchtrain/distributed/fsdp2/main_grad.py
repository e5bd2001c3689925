"""The fp32 main gradient: what a low-precision parameter's gradient is reduced and kept in.

There is no second tensor: ``parameter.grad`` itself is fp32 and is the main gradient, so that accumulation, the norm,
clipping and the optimizer see it without knowing. The one file that uses torch's private names for it.
"""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor


def apply_main_grad(model: nn.Module) -> nn.Module:
    """Let every gradient of a wrapped model arrive in fp32, whatever its parameter's storage dtype; in place.

    Call it once the groups of a unit are final, before the first forward.

    Numerics: the reduction runs in ``reduce_dtype``, which must be float32; nothing rounds the result afterwards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                # An attribute of the instance hides the method: torch calls it in its lazy initialisation, which
                # runs after materialisation, when the parameter objects are final.
                group._init_mp_dtypes = MethodType(_resolve_dtypes_with_main_grad, group)
    return model


def keep_gradients_in_fp32(model: nn.Module) -> nn.Module:
    """Do the same for a model that FSDP does not wrap, once it is materialised.

    Numerics: autograd casts each micro-batch's gradient to fp32 and adds up in fp32.
    """
    _ask_for_fp32(model)
    # ``load_state_dict(assign=True)`` puts other parameter objects in place.
    model.register_load_state_dict_post_hook(lambda module, _: _ask_for_fp32(module))
    return model


def _ask_for_fp32(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


def _resolve_dtypes_with_main_grad(group: FSDPParamGroup) -> None:
    type(group)._init_mp_dtypes(group)
    # The dtype that torch casts a reduced gradient to; None where nothing in the group is trained.
    if group._orig_dtype is not None:
        group._orig_dtype = torch.float32
    for fsdp_param in group.fsdp_params:
        if fsdp_param.sharded_param.requires_grad:
            fsdp_param.sharded_param.grad_dtype = torch.float32
            # torch calls this when other parameter objects may be in place, as after load_state_dict(assign=True).
            fsdp_param.reset_sharded_param = MethodType(_adopt_parameter, fsdp_param)
            # Once initialised, torch calls this for gradients only.
            fsdp_param.to_sharded_dtensor = MethodType(_wrap_gradient, fsdp_param)


def _adopt_parameter(fsdp_param: FSDPParam) -> None:
    type(fsdp_param).reset_sharded_param(fsdp_param)
    if fsdp_param.sharded_param.requires_grad:
        fsdp_param.sharded_param.grad_dtype = torch.float32


def _wrap_gradient(fsdp_param: FSDPParam, gradient: Tensor) -> DTensor:
    """Wrap a reduced gradient in a spec that tells its dtype; the parameter's spec tells the storage dtype instead."""
    spec = fsdp_param._sharding_spec
    assert spec.tensor_meta is not None
    spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=gradient.dtype))
    return _from_local_no_grad(gradient, spec)
