"""Sections ``checkpoint``, ``metrics``, ``profiling`` and ``debug``: what a run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchtrain.config.fsdp import DTypeName
from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When training state is saved, kept and resumed."""

    interval: int = 0
    """Save every this many steps; 0 saves only at the end."""
    save_final: bool = True
    """Save after the last step."""
    async_save: bool = False
    """Write in the background after staging a copy."""
    keep_last: int = 3
    """Whole checkpoints kept; older ones are removed. 0 keeps all."""
    resume: str | None = None
    """``auto``: the newest whole checkpoint of ``training.output_dir``, if any; or a path; null starts anew."""
    export_hf: bool = False
    """At the end, write the model for Hugging Face to ``hugging_face`` in ``training.output_dir``."""
    export_dtype: DTypeName | None = None
    """Dtype of the export; null is ``model.init_dtype``."""
    export_max_file_gb: float | None = 5.0
    """GiB after which the export begins another file; null writes one."""


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """What is logged, where."""

    log_interval: int = 1
    """Steps between lines on the console and in the log."""
    console: Literal["auto", "plain", "rich"] = "auto"
    """``plain``: lines; ``rich``: a live bar below them; ``auto``: the bar where there is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    wandb: bool = False
    """Log to Weights & Biases too; the package must be installed."""
    wandb_project: str = "torchtrain"
    """Project name there."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device for MFU; null looks the device up and leaves MFU out where unknown."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig(Section):
    """Traces and memory snapshots on a schedule."""

    trace_interval: int = 0
    """Record a profiler trace every this many steps; 0 never."""
    trace_steps: int = 1
    """Steps recorded each time."""
    memory_snapshot_interval: int = 0
    """Dump an allocator snapshot every this many steps, on devices that have one; 0 never."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig(Section):
    """Instruments for looking inside."""

    comm_trace: bool = False
    """Write every collective of every step, with its axis, unit, phase and bytes, to ``comm_trace.jsonl``."""
    force_balanced_routing: bool = False
    """Send tokens to experts in turn, whatever the router says: for benchmarks. The model does not learn to route."""
