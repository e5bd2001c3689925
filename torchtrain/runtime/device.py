"""The only file that names device APIs: cuda, npu, cpu.

``torch.get_device_module`` gives ``torch.cuda`` or ``torch.npu``, which agree on every function used here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from torchtrain.errors import ConfigError, Fault

# Dense bf16 tensor-core FLOP/s (the sheets' headline numbers are with 2:4 sparsity, twice these), most specific name
# first. Source: NVIDIA data sheets "A100 Tensor Core GPU", "H100 Tensor Core GPU", "H200 Tensor Core GPU", "L40S", and
# "DGX B200" (per GPU).
_PEAK_BF16_FLOPS: tuple[tuple[str, float], ...] = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("L40S", 362e12),
)

# Collective backends that serve each device type, its own first.
_BACKENDS_OF_DEVICE = {"cpu": ("gloo",), "cuda": ("nccl", "gloo"), "npu": ("hccl", "gloo")}


def resolve_device(name: str, local_rank: int) -> torch.device:
    """Turn ``accelerator.device`` into this rank's device and make it the current one.

    Args:
        name: ``auto``, ``cpu``, ``cuda`` or ``npu``; ``auto`` takes an accelerator where there is one.
        local_rank: Rank on this node, which is the index of its accelerator.

    Raises:
        ConfigError: The device is not there, or the node has fewer accelerators than ranks.
    """
    found, kind = _find_accelerator(), device_kind(name)
    if kind == "cpu":
        return torch.device("cpu")
    if kind != found:
        have = "this machine has no accelerator that torch can use" if found is None else f"torch found {found} here"
        raise ConfigError([Fault("accelerator.device", name, f"must be present: {have}", "use auto or cpu")])
    num_devices = count_accelerators()
    if local_rank >= num_devices:
        rule = f"needs one {kind} device per rank of the node, which has {num_devices}"
        fix = f"start at most {num_devices} ranks on this node, or set accelerator.device to cpu"
        raise ConfigError([Fault("accelerator.device", name, rule, fix)])
    device = torch.device(kind, local_rank)
    torch.get_device_module(device).set_device(device)
    return device


def device_kind(name: str) -> str:
    """Say what type of device ``accelerator.device`` means here, present or not."""
    return (_find_accelerator() or "cpu") if name == "auto" else name


def count_accelerators() -> int:
    """Count the accelerators of this node that torch can use."""
    kind = _find_accelerator()
    return 0 if kind is None else torch.get_device_module(kind).device_count()


def collective_backend(device: torch.device, name: str | None = None) -> str:
    """Name the collective backends as torch takes them; CPU tensors always travel by gloo.

    Args:
        device: This rank's device.
        name: ``accelerator.backend``; ``None`` is the device's own.

    Raises:
        ConfigError: The backend does not serve the device.
    """
    fitting = _BACKENDS_OF_DEVICE[device.type]
    if name is not None and name not in fitting:
        rule, fix = f"does not serve the device, {device.type}", f"use {' or '.join(fitting)}, or null"
        raise ConfigError([Fault("accelerator.backend", name, rule, fix)])
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{name or fitting[0]}"


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class SideStream:
    """A stream of an accelerator beside the current one. Not run here: there was no accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    @contextmanager
    def entered(self, *, reading: torch.Tensor) -> Generator[None]:
        """Queue what is inside on this stream, after all that is queued on the current one."""
        self._stream.wait_stream(self._module.current_stream())
        reading.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    def record_event(self) -> torch.Event:
        """Mark the point that this stream has been given work up to."""
        return self._stream.record_event()

    def join(self, event: torch.Event, *, written: torch.Tensor) -> None:
        """Make the current stream wait for the mark, and use what was written until then."""
        current = self._module.current_stream()
        current.wait_event(event)
        written.record_stream(current)


@cache
def side_stream(device: torch.device) -> SideStream | None:
    """Return the one side stream of a device; ``None`` on the CPU, where work in the background needs none."""
    return None if device.type == "cpu" else SideStream(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the high-water mark.

    Accelerators: bytes of live tensors. CPU: resident memory of the process since its start, Python included.
    """
    if device.type != "cpu":
        return torch.get_device_module(device).max_memory_allocated(device)
    bytes_per_unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def device_rng_state(device: torch.device) -> torch.Tensor | None:
    """Read the device's own random generator; ``None`` on the CPU, whose generator is torch's global one."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_device_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the device's own random generator to what ``device_rng_state`` read."""
    torch.get_device_module(device).set_rng_state(state, device)


def has_float64(device: torch.device) -> bool:
    """Say whether the device computes in fp64, at whatever speed."""
    return device.type != "npu"


def has_fused_adamw(device: torch.device) -> bool:
    """Say whether ``torch.optim.AdamW(fused=True)`` has a kernel for this device."""
    return device.type in ("cpu", "cuda")


def peak_flops(device: torch.device) -> float | None:
    """Look up the peak dense bf16 FLOP/s of the device; ``None`` where unknown, as for every CPU."""
    return None if device.type == "cpu" else find_peak_flops(torch.get_device_module(device).get_device_name(device))


def find_peak_flops(device_name: str) -> float | None:
    """Look a device name, as its driver spells it, up in the table of peak dense bf16 FLOP/s."""
    return next((flops for part, flops in _PEAK_BF16_FLOPS if part in device_name), None)


def device_description(device: torch.device) -> str:
    """Describe the device in words, for the log."""
    if device.type == "cpu":
        return f"CPU {platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"
    module = torch.get_device_module(device)
    gib = module.get_device_properties(device).total_memory / 2**30
    return f"{module.get_device_name(device)}, {gib:.0f} GiB"


def has_memory_snapshot(device: torch.device) -> bool:
    """Say whether the device's allocator can record its history."""
    return device.type != "cpu" and hasattr(torch.get_device_module(device), "memory")


def record_memory_history(device: torch.device, *, enabled: bool) -> None:
    """Switch the recording of allocations, with their stacks, on or off."""
    # Private by its underscore, public by PyTorch's documentation ("Understanding CUDA Memory Usage").
    torch.get_device_module(device).memory._record_memory_history(enabled="all" if enabled else None)


def dump_memory_snapshot(device: torch.device, path: Path) -> None:
    """Write what was recorded to a file for https://pytorch.org/memory_viz."""
    torch.get_device_module(device).memory._dump_snapshot(str(path))


def _find_accelerator() -> str | None:
    """Find the kind of accelerator here; Ascend's becomes known to torch by importing its extension."""
    if torch.cuda.is_available():
        return "cuda"
    if importlib.util.find_spec("torch_npu") is not None:
        importlib.import_module("torch_npu")
        if torch.get_device_module("npu").is_available():
            return "npu"
    return None
