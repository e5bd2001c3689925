"""What FSDP does between the micro-batches of one step, and after forwards alone. Called by the training loop."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtrain.config.fsdp import FSDP2Config


def set_micro_batch_policy(model: nn.Module, config: FSDP2Config, *, is_last_micro_batch: bool) -> None:
    """Say what the coming backward does with gradients and full parameters; a model without FSDP is left alone.

    On the last micro-batch every gradient is reduced and every parameter resharded, whatever the job says. Before it,
    ``requires_grad_sync`` decides about the reduce-scatter and ``reshard_after_backward`` about the parameters; the
    HSDP all-reduce always waits for the last one, because partial sums over the shard axis can simply be added up.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(is_last_micro_batch or config.requires_grad_sync)
    model.set_requires_all_reduce(is_last_micro_batch)
    model.set_reshard_after_backward(is_last_micro_batch or config.reshard_after_backward)
    model.set_is_last_backward(is_last_micro_batch)


def reshard(model: nn.Module) -> None:
    """Free the full parameters that no backward will: the root's, and with ``reshard_after_forward`` off everyone's."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
