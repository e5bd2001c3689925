"""CPU offload: sharded parameters, gradients and optimizer state live on the CPU between uses.

torch moves the tensors; this file decides where they start, and whether the host has room for them at all.
"""

from __future__ import annotations

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


def check_host_memory(model: nn.Module, *, fp32_main_params: bool) -> None:
    """Refuse an offloaded model that does not fit into the memory of its hosts; call it before materialisation.

    Args:
        model: Sharded, on meta.
        fp32_main_params: Whether the optimizer keeps fp32 copies and the gradients are fp32.

    Raises:
        ConfigError: The ranks of one host together need more than it has; the same error on every rank.

    Collective: the whole world.
    """
    mine = HostMemory(host_name(), host_bytes(model, fp32_main_params=fp32_main_params), available_memory_bytes())
    everyone: list[HostMemory] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if faults := find_memory_faults(everyone):
        raise ConfigError(faults)


def host_bytes(model: nn.Module, *, fp32_main_params: bool) -> int:
    """Bytes that this rank's shards need on the host: parameters, gradients, main parameters and two moments.

    Optimizers with fewer moments need less; pinned copies and the allocator need more.
    """
    total = 0
    for parameter in model.parameters():
        local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
        storage = local.element_size()
        per_element = storage
        if parameter.requires_grad:
            state = _FP32_BYTES if fp32_main_params else storage
            has_copy = fp32_main_params and parameter.dtype != torch.float32
            per_element += state + _NUM_MOMENTS * state + has_copy * _FP32_BYTES
        total += local.numel() * per_element
    return total


def find_memory_faults(ranks: list[HostMemory]) -> list[Fault]:
    """Add up what the ranks of each host need, and name the hosts that have less."""
    faults = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        local = [rank for rank in ranks if rank.host == host]
        available = min((rank.available for rank in local if rank.available is not None), default=None)
        needed = sum(rank.needed for rank in local)
        if available is not None and needed > available:
            rule = (
                f"needs {_gib(needed)} of memory on host {host} for the parameters, gradients and optimizer state of "
                f"its {len(local)} rank(s), but {_gib(available)} are available"
            )
            fix = "use more hosts with a larger fsdp_config.dp_shard_size, a smaller model, or false"
            faults.append(Fault("fsdp_config.enable_offload", True, rule, fix))
    return faults


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
