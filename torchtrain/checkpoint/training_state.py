"""What a checkpoint holds, as the live objects themselves: saving reads them, loading writes into them.

Names are parameter fqns, which no topology changes: ``model.<fqn>``, ``optimizer.<fqn>.<name>``, and ``main.<fqn>`` for
the fp32 main parameter of a weight that is stored in low precision. A tied weight is there once, under its first name.
Learning rate, betas and other hyperparameters are not: they belong to the job.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torchtrain.errors import CheckpointError
from torchtrain.optim.main_params import MainParamOptimizer
from torchtrain.runtime.device import device_rng_state, set_device_rng_state

Scalar = bool | int | float | str | None
RNG_PREFIX = "rng."
MAIN_PREFIX = "main."
_OPTIMIZER_PREFIX = "optimizer."
_MAX_NAMES_SHOWN = 5


@dataclass(frozen=True)
class TrainingState:
    """Tensors that share memory with the model and the optimizer, and the optimizer's entries that are no tensors."""

    tensors: dict[str, Tensor]
    scalars: dict[str, dict[str, Scalar]]
    """By parameter fqn, then by name."""


def view_training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, create_missing: bool = True
) -> TrainingState:
    """Name the live tensors of a model and its optimizer.

    Args:
        model: Its parameters, sharded or not.
        optimizer: Its state.
        create_missing: Create the state of an optimizer that has not stepped yet, for something to be loaded into it.
            It takes a step of size zero, which it counts: not for one that goes on from there.

    Raises:
        CheckpointError: The optimizer keeps something that is neither a tensor nor a number.
    """
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    # FSDP2 shards its parameters again when it is asked for the state; the optimizer is named by those same objects.
    for fqn, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[f"model.{fqn}"] = tensor.detach()
    scalars: dict[str, dict[str, Scalar]] = {}
    if isinstance(optimizer, MainParamOptimizer):
        mains = optimizer.main_params
        named = dict(model.named_parameters())
        tensors |= {f"{MAIN_PREFIX}{fqn}": mains[p].detach() for fqn, p in named.items() if p in mains}
    state = _state_by_fqn(model, optimizer) if optimizer.state or create_missing else {}
    for fqn, entries in state.items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{_OPTIMIZER_PREFIX}{fqn}.{name}"] = value.detach()
            elif isinstance(value, Scalar):
                scalars.setdefault(fqn, {})[name] = value
            else:
                kind = type(value).__name__
                raise CheckpointError(
                    f"optimizer state {name} of {fqn} is of type {kind}: only tensors and numbers are saved"
                )
    return TrainingState(tensors, scalars)


def _state_by_fqn(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    if isinstance(optimizer, MainParamOptimizer):
        # torch would create the state with gradients of the weights' dtype, which fp32 main gradients refuse.
        optimizer.create_state()
        return {fqn: optimizer.state[p] for fqn, p in model.named_parameters() if p in optimizer.state}
    return cast(dict[str, dict[str, Any]], get_optimizer_state_dict(model, optimizer)["state"])


def without_optimizer_state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out what belongs to the optimizer."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_OPTIMIZER_PREFIX)}


def forget_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer be as it was before its first step."""
    optimizer.state.clear()
    if isinstance(optimizer, MainParamOptimizer):
        optimizer.inner.state.clear()


def restore_scalars(model: nn.Module, optimizer: torch.optim.Optimizer, scalars: dict[str, dict[str, Scalar]]) -> None:
    """Put the optimizer's entries that are no tensors back."""
    for fqn, parameter in model.named_parameters():
        if fqn in scalars:
            optimizer.state[parameter].update(scalars[fqn])


def read_rng_state(device: torch.device) -> dict[str, Tensor]:
    """Copy this rank's generators: the CPU's, and the device's where it has its own."""
    states = {_rng_name("cpu"): torch.get_rng_state()}
    device_state = device_rng_state(device)
    if device_state is not None:
        states[_rng_name(device.type)] = device_state
    return states


def restore_rng_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Set this rank's generators to what ``read_rng_state`` read."""
    torch.set_rng_state(states[_rng_name("cpu")])
    if device.type != "cpu":
        set_device_rng_state(device, states[_rng_name(device.type)])


def _rng_name(device_type: str) -> str:
    return f"{RNG_PREFIX}{dist.get_rank()}.{device_type}"


def lacks_main_params(metadata: Metadata, tensors: Iterable[str]) -> bool:
    """Whether a checkpoint holds not one of the main parameters that a run keeps: it was saved by a run without any."""
    has_any = any(name.startswith(MAIN_PREFIX) for name in metadata.state_dict_metadata)
    return not has_any and any(name.startswith(MAIN_PREFIX) for name in tensors)


def find_mismatch(metadata: Metadata, tensors: dict[str, Tensor], names_of_all_ranks: Iterable[str]) -> str | None:
    """Say how a checkpoint differs from what would be loaded; ``None`` when every tensor has its counterpart.

    A checkpoint without any main parameters is no mismatch, whatever the dtype of its moments: they are cast.

    Args:
        metadata: What the checkpoint holds.
        tensors: This rank's live tensors.
        names_of_all_ranks: Names of all ranks' tensors: a pipeline stage has only its own.
    """
    entries = {
        name: entry
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith(RNG_PREFIX)
    }
    saved = {name: _describe(entry.size, entry.properties.dtype) for name, entry in entries.items()}
    live = {name: _describe(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if lacks_main_params(metadata, tensors):
        live = {name: shown for name, shown in live.items() if not name.startswith(MAIN_PREFIX)}
        for name in [name for name in live if name.startswith(_OPTIMIZER_PREFIX) and name in saved]:
            saved[name] = _describe(entries[name].size, tensors[name].dtype)
    missing = [name for name in live if name not in saved]
    unknown = sorted(saved.keys() - set(names_of_all_ranks))
    different = [
        f"{name}: {saved[name]} there, {shown} here" for name, shown in live.items() if saved.get(name, shown) != shown
    ]
    parts = [
        f"{what} {_show(names)}"
        for what, names in (("lacks", missing), ("has besides", unknown), ("differs in", different))
        if names
    ]
    return "; ".join(parts) or None


def _describe(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _show(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES_SHOWN} more" if len(names) > _MAX_NAMES_SHOWN else ""
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + more
