"""Counts where Python waits for a device, on a machine that has none: every tensor plays one of a device.

Those on the host are what ``cpu()`` returned, what was made without a device, and what was computed from these alone.
Seen is what Python calls outside of autograd's engine and of operators of our own; operators in C++ that wait by
themselves are seen by their names, which stand below.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = ("item", "tolist", "numpy", "cpu", "equal", "allclose", "is_nonzero")
_READS += ("__bool__", "__int__", "__float__", "__index__", "__contains__", "__format__", "__repr__")
_SIZED_BY_VALUES = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
_PLACE = "plays_a_tensor_on_the_host"


class HostSyncs(TorchFunctionMode):
    """Notes each wait of the host for the device, and each copy to the device that may wait for it.

    Attributes:
        seen: Names of the calls, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        tensors = list(_tensors((args, kwargs)))
        is_on_host = all(hasattr(tensor, _PLACE) for tensor in tensors) if tensors else "device" not in kwargs
        result = func(*args, **kwargs)
        if name == "cpu":
            # The CPU's own returns its argument, which stays where it is.
            result, is_moved = result.clone(), not is_on_host
            is_on_host = True
        elif name == "to" and is_on_host and _names_a_device(args[1:], kwargs):
            result, is_moved = result.clone(), True
            is_on_host = False
        else:
            is_moved = not is_on_host and _waits(name, args, kwargs)
        if is_moved:
            self.seen.append(name)
        for tensor in _tensors(result) if is_on_host else ():
            setattr(tensor, _PLACE, True)
        return result


def _names_a_device(args: Any, kwargs: Any) -> bool:
    return "device" in kwargs or any(isinstance(argument, torch.device | str) for argument in args)


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name in _READS or name in _SIZED_BY_VALUES:
        return True
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and len(args) > 1 and isinstance(args[1], Tensor)
    if name == "where":
        return len(args) == 1
    if name == "tensor_split":
        return isinstance(args[1], Tensor)
    is_index = name in ("__getitem__", "__setitem__")
    return is_index and any(tensor.dtype == torch.bool for tensor in _tensors(args[1]))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)
