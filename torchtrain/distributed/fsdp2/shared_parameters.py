"""Parameters tied across units, such as one matrix used by two blocks: the root owns them, the blocks borrow them.

torch gives a parameter to the unit whose module holds it and does not look into wrapped modules when it wraps the root.
So the root holds such a parameter under a name of its own while it is wrapped. This file is the only one that uses
torch's private record of where a parameter is registered.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

_PREFIX = "tied_across_units_"


@contextmanager
def held_by_root(model: nn.Module, fqns: Sequence[str]) -> Generator[None]:
    """While the block runs, register the parameters on the root too; ``fully_shard(model)`` belongs inside.

    Args:
        model: The root.
        fqns: Parameters that live inside modules wrapped already, and were ignored there.

    When the block raises, the root loses those names again.
    """
    own_names = [f"{_PREFIX}{index}" for index in range(len(fqns))]
    try:
        for name, fqn in zip(own_names, fqns, strict=True):
            model.register_parameter(name, model.get_parameter(fqn))
        yield
    except BaseException:
        for name in own_names:
            model.register_parameter(name, None)
            delattr(model, name)
        raise
    if not fqns:
        return
    assert isinstance(model, FSDPModule)
    for group in model._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            if info.param_name.startswith(_PREFIX):
                delattr(model, info.param_name)
                info.module, info.param_name = info.shared_modules.pop(0), info.shared_param_names.pop(0)
