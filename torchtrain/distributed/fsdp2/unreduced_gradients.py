"""Where unreduced gradients wait: in ``reduce_dtype``, also between the two halves of a split backward.

The one file that reaches for FSDP's sums of unreduced gradients. FSDP moves a low-precision gradient into them after a
whole backward. A pipeline schedule that computes weight gradients apart does so outside of FSDP's hooks and would add
up micro-batches in ``param_dtype``.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def add_up_in_reduce_dtype(model: nn.Module) -> None:
    """Add what a backward left on the gathered parameters to FSDP's sums; a model without FSDP is left alone.

    Numerics: each micro-batch's gradient is rounded to ``param_dtype`` once, the sum of all only to ``reduce_dtype``.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for fsdp_param in group.fsdp_params:
                    fsdp_param.accumulate_unsharded_grad_if_needed()
                    fsdp_param.to_accumulated_grad_if_needed()
