"""What CPU offload does between a host and a real device: copies both ways, and a lower peak on the device."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import profile

from torchtrain.config.fsdp import FSDP2Config
from torchtrain.distributed.fsdp2.offload import build_offload_policy
from torchtrain.runtime.device import count_accelerators, peak_memory_bytes, resolve_device
from torchtrain.testing.ranks import run_ranks

ROOT = Path(__file__).parents[2]
# Enough blocks that the workspaces of kernels, which both runs have, do not decide the comparison.
NUM_BLOCKS, WIDTH = 16, 1024


@dataclass(frozen=True)
class Seen:
    peak: int
    copies: set[str]
    weights: list[Tensor]
    homes: set[str]
    """Devices of parameters, gradients and optimizer state between uses."""


def train_blocks(device_name: str, enable_offload: bool) -> Seen:
    """Two steps under FSDP on one rank, where only the host-device copies of offload are left; the second is seen."""
    device = resolve_device(device_name, 0)
    mesh = init_device_mesh(device.type, (1,))
    policy = build_offload_policy(FSDP2Config(enable_offload=enable_offload), device)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))
    for block in model:
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(4, WIDTH, device=device)
    copies: set[str] = set()
    homes: set[str] = set()
    for _ in range(2):
        with profile() as profiler:
            model(x).square().mean().backward()
            homes |= {p.device.type for p in model.parameters()} | {p.grad.device.type for p in model.parameters()}
            optimizer.step()
        copies = {event.name for event in profiler.events() if event.name.startswith("Memcpy")}
        homes |= {state["exp_avg"].device.type for state in optimizer.state.values()}
        optimizer.zero_grad()
    weights = [p.to_local().detach().cpu() for p in model.parameters()]
    return Seen(peak_memory_bytes(device), copies, weights, homes)


@pytest.mark.gpu
@pytest.mark.skipif(count_accelerators() < 1, reason="needs an accelerator")
def test_offload_copies_both_ways_and_lowers_the_device_peak() -> None:
    (kept,) = run_ranks(train_blocks, 1, "auto", False)
    (offloaded,) = run_ranks(train_blocks, 1, "auto", True)
    assert offloaded.homes == {"cpu"}
    assert any("HtoD" in name for name in offloaded.copies)
    assert any("DtoH" in name for name in offloaded.copies)
    # Kept: weights, gradients and two moments of all blocks. Offloaded: a few blocks' weights and gradients.
    assert offloaded.peak < kept.peak / 2
    torch.testing.assert_close(offloaded.weights, kept.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(count_accelerators() < 2, reason="needs two accelerators: a job's offload needs an FSDP domain")
def test_a_job_with_offload_has_a_lower_device_peak(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"Line {i} is followed by line {i + 1}.\n" for i in range(2000)))
    overrides = [
        "--fsdp_config.dp_shard_size=2",
        f"--dataset.sources=[{{path: {corpus}}}]",
        f"--dataset.cache_dir={tmp_path / 'cache'}",
    ]
    script = ROOT / "scripts" / "measure_offload.py"
    command = [sys.executable, str(script), str(ROOT / "train_configs" / "llama" / "debug_bytes.toml"), *overrides]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
