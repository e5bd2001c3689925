"""What one operator call says about a collective: its kind, group, size and the work that tells when it is done.

Covers both families of operators that torch's communication ends in: ``c10d``, behind ``torch.distributed``'s
functions, and ``_c10d_functional``, behind DTensor. The only file that uses torch's private lookup of a group by name.

``bytes`` of a collective is its payload, the same number on every rank of a group:

==================  ==================================================================================
kind                payload of n ranks                                             sent by one rank
==================  ==================================================================================
all_gather          the gathered output, padding included                          (n-1)/n of it
reduce_scatter      the whole input, padding included                              (n-1)/n of it
all_reduce          the tensor                                                     2(n-1)/n of it
all_to_all          this rank's input; ranks may differ                            (n-1)/n of it
broadcast, reduce   the tensor                                                     (n-1)/n of it
gather, scatter     what the ranks hold together, as far as this rank sees it      (n-1)/n of it
send                the tensor                                                     all of it
recv                the tensor                                                     nothing
barrier             nothing                                                        nothing
==================  ==================================================================================

What one rank sends is the average of the ring algorithm, which no algorithm beats for these kinds but which a backend
may not use; fractions are rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from torchtrain.distributed.comm_volume import sent_bytes


@dataclass(frozen=True)
class Operator:
    """How to read a collective off the arguments of one operator."""

    kind: str
    payload: int
    """Position of the tensor, or of the list of them, that is the payload."""
    group: int
    """Position of the group: an object, or a name."""
    is_multiplied: bool = False
    """The payload is what stands there times the ranks of the group."""


@dataclass(frozen=True)
class Collective:
    """One call of a collective on this rank."""

    kind: str
    group: dist.ProcessGroup
    bytes: int
    sent_bytes: int
    dtype: str
    is_blocking: bool
    """Whether the caller waits on the host until it is done."""


# After the arguments' order in torch/csrc/distributed/c10d/Ops.cpp.
_C10D = {
    "_allgather_base_": Operator("all_gather", 0, 2),
    "allgather_": Operator("all_gather", 0, 2),
    "allgather_coalesced_": Operator("all_gather", 0, 2),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 0, 2),
    "_reduce_scatter_base_": Operator("reduce_scatter", 1, 2),
    "reduce_scatter_": Operator("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 1, 2),
    "allreduce_": Operator("all_reduce", 0, 1),
    "allreduce_coalesced_": Operator("all_reduce", 0, 1),
    "alltoall_": Operator("all_to_all", 1, 2),
    "alltoall_base_": Operator("all_to_all", 1, 2),
    "broadcast_": Operator("broadcast", 0, 1),
    "reduce_": Operator("reduce", 0, 1),
    "gather_": Operator("gather", 1, 2, is_multiplied=True),
    "scatter_": Operator("scatter", 0, 2, is_multiplied=True),
    "send": Operator("send", 0, 1),
    "recv_": Operator("recv", 0, 1),
    "recv_any_source_": Operator("recv", 0, 1),
    "barrier": Operator("barrier", 0, 1),
    "monitored_barrier_": Operator("barrier", 0, 1),
}
# After torch/csrc/distributed/c10d/Functional.cpp; the group always stands last.
_FUNCTIONAL = {
    "all_gather_into_tensor": Operator("all_gather", 0, -1, is_multiplied=True),
    "all_gather_into_tensor_out": Operator("all_gather", 0, -1, is_multiplied=True),
    "all_gather_into_tensor_coalesced": Operator("all_gather", 0, -1, is_multiplied=True),
    "reduce_scatter_tensor": Operator("reduce_scatter", 0, -1),
    "reduce_scatter_tensor_out": Operator("reduce_scatter", 0, -1),
    "reduce_scatter_tensor_coalesced": Operator("reduce_scatter", 0, -1),
    "all_reduce": Operator("all_reduce", 0, -1),
    "all_reduce_": Operator("all_reduce", 0, -1),
    "all_reduce_coalesced": Operator("all_reduce", 0, -1),
    "all_reduce_coalesced_": Operator("all_reduce", 0, -1),
    "all_to_all_single": Operator("all_to_all", 0, -1),
    "broadcast": Operator("broadcast", 0, -1),
    "broadcast_": Operator("broadcast", 0, -1),
    "isend": Operator("send", 0, -1),
    "irecv": Operator("recv", 0, -1),
}
OPERATORS = {
    **{f"c10d::{name}": operator for name, operator in _C10D.items()},
    **{f"_c10d_functional::{name}": operator for name, operator in _FUNCTIONAL.items()},
    **{f"_c10d_functional_autograd::{name}": operator for name, operator in _FUNCTIONAL.items()},
}
"""Every operator that is a collective, by its full name."""


def read_collective(operator: Operator, args: Sequence[Any]) -> Collective:
    """Say what the call of ``operator`` with ``args`` does."""
    group = _group(args[operator.group])
    tensors = list(_tensors(args[operator.payload]))
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    num_bytes *= group.size() if operator.is_multiplied else 1
    num_bytes = 0 if operator.kind == "barrier" else num_bytes
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    sent = sent_bytes(operator.kind, num_bytes, group.size())
    # ``async_op`` is the one truth value among the arguments. Accelerators make the device wait, not the host.
    is_blocking = any(argument is False for argument in args) and all(tensor.is_cpu for tensor in tensors)
    return Collective(operator.kind, group, num_bytes, sent, "+".join(dtypes), is_blocking)


def find_work(result: Any) -> dist.Work | None:
    """The work among what a ``c10d`` operator returned; functional operators keep theirs to themselves."""
    candidates = result if isinstance(result, tuple | list) else (result,)
    objects = [candidate for candidate in candidates if isinstance(candidate, torch.ScriptObject)]
    return dist.Work.unbox(objects[-1]) if objects else None


def _group(argument: Any) -> dist.ProcessGroup:
    if isinstance(argument, str):
        return _resolve_process_group(GroupName(argument))
    return argument if isinstance(argument, dist.ProcessGroup) else dist.ProcessGroup.unbox(argument)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
