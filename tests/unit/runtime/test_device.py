import pytest
import torch

from torchtrain.errors import ConfigError
from torchtrain.runtime.device import (
    collective_backend,
    count_accelerators,
    device_description,
    device_rng_state,
    find_peak_flops,
    has_fused_adamw,
    has_memory_snapshot,
    peak_flops,
    peak_memory_bytes,
    resolve_device,
    set_device_rng_state,
    synchronize,
)

CPU = torch.device("cpu")
without_accelerator = pytest.mark.skipif(count_accelerators() > 0, reason="this machine has an accelerator")


def test_the_cpu_answers_every_question():
    assert resolve_device("cpu", 3) == CPU
    assert collective_backend(CPU) == "gloo"
    assert has_fused_adamw(CPU)
    assert peak_flops(CPU) is None
    assert not has_memory_snapshot(CPU)
    assert device_rng_state(CPU) is None
    assert "CPU" in device_description(CPU)
    synchronize(CPU)


@pytest.mark.parametrize(
    ("device", "name", "backend"),
    [
        ("cpu", None, "gloo"),
        ("cpu", "gloo", "gloo"),
        ("cuda", None, "cpu:gloo,cuda:nccl"),
        ("cuda", "nccl", "cpu:gloo,cuda:nccl"),
        ("cuda", "gloo", "cpu:gloo,cuda:gloo"),
    ],
)
def test_a_backend_serves_the_device_and_gloo_the_cpu(device, name, backend):
    assert collective_backend(torch.device(device), name) == backend


@pytest.mark.parametrize(("device", "name"), [("cpu", "nccl"), ("cpu", "hccl"), ("cuda", "hccl")])
def test_a_backend_that_does_not_serve_the_device_is_refused(device, name):
    with pytest.raises(
        ConfigError, match=rf"accelerator\.backend = '{name}': does not serve the device, {device}; use"
    ):
        collective_backend(torch.device(device), name)


def test_cpu_memory_mark_grows_with_use():
    before = peak_memory_bytes(CPU)
    assert before > 50 * 2**20
    ballast = torch.ones(int(before / 4 * 1.5))
    assert peak_memory_bytes(CPU) > before
    del ballast


@without_accelerator
def test_auto_falls_back_to_the_cpu():
    assert resolve_device("auto", 0) == CPU


@without_accelerator
@pytest.mark.parametrize("name", ["cuda", "npu"])
def test_an_absent_accelerator_is_refused(name):
    with pytest.raises(ConfigError, match=rf"accelerator.device = '{name}'.*auto or cpu"):
        resolve_device(name, 0)


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3060", None),
    ],
)
def test_peak_flops_goes_by_the_driver_name(device_name, tflops):
    assert find_peak_flops(device_name) == (None if tflops is None else tflops * 1e12)


def test_the_private_snapshot_api_is_still_there():
    assert callable(torch.cuda.memory._record_memory_history)
    assert callable(torch.cuda.memory._dump_snapshot)


@pytest.mark.gpu
@pytest.mark.skipif(count_accelerators() == 0, reason="needs an accelerator")
def test_accelerator_memory_mark_can_be_reset():
    device = resolve_device("auto", 0)
    ballast = torch.ones(2**26, device=device)
    synchronize(device)
    assert peak_memory_bytes(device) >= 2**28
    del ballast
    assert peak_memory_bytes(device) < 2**28
    assert collective_backend(device).startswith("cpu:gloo")


@pytest.mark.gpu
@pytest.mark.skipif(count_accelerators() == 0, reason="needs an accelerator")
def test_accelerator_draws_can_be_repeated():
    device = resolve_device("auto", 0)
    state = device_rng_state(device)
    assert state is not None
    first = torch.rand(4, device=device)
    set_device_rng_state(device, state)
    assert torch.equal(torch.rand(4, device=device), first)
