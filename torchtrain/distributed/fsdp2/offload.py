"""CPU offload: sharded parameters, gradients and optimizer state live on the CPU between uses.

torch moves the tensors; this file decides where they start, and whether the host has room for them at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.errors import ConfigError, Fault
from torchtrain.runtime.host import available_memory_bytes, host_name

_FP32_BYTES = 4
_NUM_MOMENTS = 2


def build_offload_policy(config: FSDP2Config, device: torch.device) -> OffloadPolicy:
    """Translate ``enable_offload``; memory is pinned where an accelerator copies from it."""
    return CPUOffloadPolicy(pin_memory=device.type != "cpu") if config.enable_offload else OffloadPolicy()


def parameter_device(config: FSDP2Config, device: torch.device, *, has_fsdp_domain: bool) -> torch.device:
    """Where parameters live between uses: offload is FSDP's doing, so without a domain they stay on ``device``."""
    return torch.device("cpu") if config.enable_offload and has_fsdp_domain else device


@dataclass(frozen=True)
class HostMemory:
    """What one rank will keep on its host, and what the host has left."""

    host: str
    needed: int
    available: int | None
    """None where the system does not say."""


def check_whole_builds(meta_model: nn.Module, device: torch.device) -> None:
    """Refuse a model that every rank builds whole before it is sharded (``init_on_meta: false``), where that cannot be.

    Args:
        meta_model: The model on meta, as it will be built, not sharded.
        device: Where it will be built; only a CPU takes the host's memory.

    Raises:
        ConfigError: The ranks of one host together need more than it has; the same error on every rank.

    Collective: the whole world.
    """
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in meta_model.parameters())
    everyone = _ask_everyone(num_bytes if device.type == "cpu" else 0)
    faults = [
        Fault(
            "model.init_on_meta",
            False,
            f"makes each of the {short.num_ranks} rank(s) of host {short.host} build the whole model, together "
            f"{_gib(short.needed)}, but {_gib(short.available)} are available",
            "set model.init_on_meta: true, which allocates shards only",
        )
        for short in _find_short_hosts(everyone)
    ]
    if faults:
        raise ConfigError(faults)


def check_host_memory(model: nn.Module, *, fp32_main_params: bool) -> None:
    """Refuse an offloaded model that does not fit into the memory of its hosts; call it before materialisation.

    Args:
        model: Sharded; on meta, or with memory already, which is then no longer among what is available.
        fp32_main_params: Whether the optimizer keeps fp32 copies and the gradients are fp32.

    Raises:
        ConfigError: The ranks of one host together need more than it has; the same error on every rank.

    Collective: the whole world.
    """
    if faults := find_memory_faults(_ask_everyone(host_bytes(model, fp32_main_params=fp32_main_params))):
        raise ConfigError(faults)


def host_bytes(model: nn.Module, *, fp32_main_params: bool) -> int:
    """Bytes that this rank's shards will take on the host: parameters, gradients, main parameters and two moments.

    Parameters that have their memory already take no more.
    Optimizers with fewer moments need less; pinned copies and the allocator need more.
    """
    total = 0
    for parameter in model.parameters():
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        storage = local.element_size()
        per_element = storage if local.is_meta else 0
        if parameter.requires_grad:
            state = _FP32_BYTES if fp32_main_params else storage
            has_copy = fp32_main_params and parameter.dtype != torch.float32
            per_element += state + _NUM_MOMENTS * state + has_copy * _FP32_BYTES
        total += local.numel() * per_element
    return total


def find_memory_faults(ranks: list[HostMemory]) -> list[Fault]:
    """Add up what the ranks of each host need, and name the hosts that have less."""
    return [
        Fault(
            "fsdp_config.enable_offload",
            True,
            f"needs {_gib(short.needed)} of memory on host {short.host} for the parameters, gradients and optimizer "
            f"state of its {short.num_ranks} rank(s), but {_gib(short.available)} are available",
            "use more hosts with a larger fsdp_config.dp_shard_size, a smaller model, or false",
        )
        for short in _find_short_hosts(ranks)
    ]


@dataclass(frozen=True)
class _ShortHost:
    host: str
    needed: int
    available: int
    num_ranks: int


def _find_short_hosts(ranks: list[HostMemory]) -> Iterator[_ShortHost]:
    for host in dict.fromkeys(rank.host for rank in ranks):
        local = [rank for rank in ranks if rank.host == host]
        available = min((rank.available for rank in local if rank.available is not None), default=None)
        needed = sum(rank.needed for rank in local)
        if available is not None and needed > available:
            yield _ShortHost(host, needed, available, len(local))


def _ask_everyone(needed: int) -> list[HostMemory]:
    mine = HostMemory(host_name(), needed, available_memory_bytes())
    everyone: list[HostMemory] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
