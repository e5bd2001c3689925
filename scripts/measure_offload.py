"""Run a job with and without CPU offload and show what it saves on the device and what it copies for that.

    python scripts/measure_offload.py train_configs/llama/debug.yaml --ranks 2 --fsdp_config.dp_shard_size=2

Anything else on the command line is an override of the job, as for ``torchtrain.train``. Peak memory is the largest
``peak_memory_bytes`` reported; copies between host and device are counted in rank 0's profiler trace of the last step.

Exit codes: 0; 1 where a run failed, or offload did not lower the peak or copied nothing one way; 2 where there is no
accelerator, as a CPU has no device memory to save and nothing to copy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtrain.metrics.jsonl import read_jsonl
from torchtrain.runtime.device import count_accelerators

_QUIET = ("--checkpoint.interval=0", "--checkpoint.save_final=false", "--checkpoint.resume=null")
_QUIET += ("--task.eval_interval=0", "--task.sample_prompt=null", "--metrics.console=plain")


@dataclass(frozen=True)
class Copies:
    """Copies in one direction."""

    count: int
    bytes: int


@dataclass(frozen=True)
class Footprint:
    """What one run took."""

    peak_memory_bytes: int
    host_to_device: Copies
    device_to_host: Copies
    final_loss: float


def measure(job: str, overrides: Sequence[str], *, ranks: int, steps: int, enable_offload: bool) -> Footprint:
    """Run the job once, in fresh processes and an empty folder.

    Raises:
        RuntimeError: It failed; the message ends with what it said last.
    """
    with tempfile.TemporaryDirectory() as scratch:
        output_dir = Path(scratch) / "run"
        settings = {
            "training.steps": steps,
            "training.output_dir": output_dir,
            "profiling.trace_interval": steps,
            "fsdp_config.enable_offload": str(enable_offload).lower(),
        }
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        words = [*_QUIET, *overrides, *(f"--{key}={value}" for key, value in settings.items())]
        run = subprocess.run([*launcher, "-m", "torchtrain.train", job, *words], capture_output=True, text=True)
        if run.returncode != 0:
            tail = "\n".join((run.stdout + run.stderr).splitlines()[-30:])
            raise RuntimeError(f"enable_offload {enable_offload} ended with exit code {run.returncode}:\n{tail}")
        reports = read_jsonl(output_dir / "metrics.jsonl")
        trace = output_dir / "profile" / f"step_{steps}" / "rank_0.json"
        return Footprint(
            peak_memory_bytes=max(report["peak_memory_bytes"] for report in reports),
            host_to_device=count_copies(trace, "HtoD"),
            device_to_host=count_copies(trace, "DtoH"),
            final_loss=reports[-1]["loss"],
        )


def count_copies(trace: Path, direction: str) -> Copies:
    """Count the memory copies of a profiler trace, by the word that names their direction in it."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    copies = [event for event in events if event.get("name", "").startswith(f"Memcpy {direction}")]
    return Copies(len(copies), sum(event.get("args", {}).get("bytes", 0) for event in copies))


def find_disappointments(without: Footprint, offloaded: Footprint) -> list[str]:
    """Say what offload should have done on an accelerator and did not."""
    claims = {
        "the device peak is not lower": offloaded.peak_memory_bytes < without.peak_memory_bytes,
        "no more copies to the device": offloaded.host_to_device.count > without.host_to_device.count,
        "no more copies to the host": offloaded.device_to_host.count > without.device_to_host.count,
    }
    return [claim for claim, is_kept in claims.items() if not is_kept]


def describe(label: str, footprint: Footprint) -> str:
    """One line."""
    to_device, to_host = footprint.host_to_device, footprint.device_to_host
    return (
        f"{label:<12} peak {footprint.peak_memory_bytes / 2**20:10.1f} MiB   H2D {to_device.count:5d} copies "
        f"{to_device.bytes / 2**20:9.1f} MiB   D2H {to_host.count:5d} copies {to_host.bytes / 2**20:9.1f} MiB   "
        f"loss {footprint.final_loss:.6f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure both, print both."""
    parser = argparse.ArgumentParser(description="Measure what CPU offload saves and copies.")
    parser.add_argument("job", help="job file")
    parser.add_argument("--ranks", type=int, default=2, help="at least 2: offload is FSDP's doing")
    parser.add_argument("--steps", type=int, default=5, help="at least 2; the last one is traced")
    arguments, overrides = parser.parse_known_args(argv)
    if count_accelerators() == 0:
        print("error: torch sees no accelerator here, and offload saves and copies nothing on a CPU", file=sys.stderr)
        return 2
    footprints = []
    try:
        for enable_offload in (False, True):
            footprint = measure(
                arguments.job, overrides, ranks=arguments.ranks, steps=arguments.steps, enable_offload=enable_offload
            )
            print(describe("offload" if enable_offload else "no offload", footprint), flush=True)
            footprints.append(footprint)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    disappointments = find_disappointments(*footprints)
    print("\n".join(disappointments) or "offload lowers the device peak and copies both ways")
    return 1 if disappointments else 0


if __name__ == "__main__":
    sys.exit(main())
