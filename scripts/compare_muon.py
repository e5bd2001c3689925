"""Time this project's Muon against ``torch.optim.Muon`` on the same sharded matrices, in one run.

    python scripts/compare_muon.py --ranks 2 --rounds 7

Both step the matrices of a Llama's blocks, random and sharded on dim 0 as FSDP does. They alternate, and the one that
goes first changes each round; what is printed is the median over rounds of the slowest rank. torch orthogonalises in
bfloat16, so ours is timed in that dtype as well as in its own choice for CPUs, float32. This is gloo on CPUs: what the
ratio is on GPUs has to be measured there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from models.registry import load_spec, resolve_architecture
from torchtrain.optim.muon import Muon
from torchtrain.testing.ranks import run_ranks

TORCH = "torch.optim.Muon (bfloat16)"
_WARM_UP_ROUNDS = 1


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--preset", default="debug", help="size of the Llama")
    args = parser.parse_args()
    by_rank = run_ranks(time_optimizers, args.ranks, find_shapes(args.preset), args.rounds, timeout_s=600.0)
    steps = {name: median(map(max, zip(*(seconds[name] for seconds in by_rank), strict=True))) for name in by_rank[0]}
    for name, seconds in steps.items():
        print(f"{name:<30} {1e3 * seconds:9.2f} ms/step   {seconds / steps[TORCH]:.3f} of torch's")


def find_shapes(preset: str) -> list[tuple[int, ...]]:
    """List the shapes of a Llama that Muon steps unless told otherwise: the matrices of its blocks."""
    with torch.device("meta"):
        model = load_spec("llama").build(resolve_architecture("llama", preset, {}))
    return [tuple(parameter.shape) for parameter in model.get_submodule("layers").parameters() if parameter.ndim == 2]


def time_optimizers(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round's step on this rank, by optimizer."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    optimizers: dict[str, torch.optim.Optimizer] = {
        TORCH: torch.optim.Muon(build_matrices(mesh, shapes), adjust_lr_fn="match_rms_adamw"),
        "ours (bfloat16)": Muon(build_matrices(mesh, shapes), ns_dtype="bfloat16"),
        "ours (float32)": Muon(build_matrices(mesh, shapes), ns_dtype="float32"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for index in range(_WARM_UP_ROUNDS + rounds):
        for name in list(optimizers)[:: 1 if index % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            optimizers[name].step()
            if index >= _WARM_UP_ROUNDS:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def build_matrices(mesh: DeviceMesh, shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    """Make sharded matrices, each with a gradient; the same at every call."""
    parameters = []
    torch.manual_seed(0)
    for shape in shapes:
        parameter = nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        parameters.append(parameter)
    return parameters


if __name__ == "__main__":
    main()
