"""The one file that takes dispatch modes off their stack: FSDP's own operators are hidden from selective checkpointing.

That is a dispatch mode which sees every operator of a region and expects the recomputation to run no other ones. FSDP's
hooks of a unit inside the region gather now in one pass, now in the other, as prefetching has it. They compute nothing
that is recomputed, so the mode need not see them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import checkpoint


def hide_hooks(module: nn.Module) -> None:
    """Hide what FSDP does around the forward of a unit; the forward itself stays visible.

    Args:
        module: A unit of FSDP's, with no hooks after FSDP's.
    """
    assert isinstance(module, FSDPModule), "hooks to hide are those of a unit of FSDP's"
    hidden: list[list[TorchDispatchMode]] = []

    def begin(*_: Any) -> None:
        stack = list(_get_current_dispatch_mode_stack())
        hidden.append(stack)
        _replace_stack([mode for mode in stack if type(mode).__module__ != checkpoint.__module__])

    def end(*_: Any) -> None:
        _replace_stack(hidden.pop())

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_pre_hook(end)
    module.register_forward_hook(begin, prepend=True)
    module.register_forward_hook(end)


def _replace_stack(modes: list[TorchDispatchMode]) -> None:
    for _ in _get_current_dispatch_mode_stack():
        _pop_mode()
    for mode in modes:
        _push_mode(mode)
