"""Which models and which keys the plugin fsdpturbo takes. Imports no torch.

A family registers with ``FSDPTURBO`` in its ``architecture`` file: the plugin takes the place of experts from there and
not from the job, so that the two cannot disagree. Sizes and ranks are checked in ``topology``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtrain.config.job import Job
from torchtrain.errors import Fault


@dataclass(frozen=True)
class FSDPTurboModel:
    """What the plugin knows of a family."""

    expert_modules: tuple[str, ...]
    """Patterns of the fqns of modules whose parameters are stacks of routed experts, and nothing else."""


def find_plugin_faults(
    job: Job, *, family: str, registered: FSDPTurboModel | None, registered_families: Sequence[str]
) -> list[Fault]:
    """List why the plugin cannot do what a job asks of it; nothing where another plugin is in use.

    Args:
        job: The job.
        family: Name of the model family.
        registered: What the family registered, if it did.
        registered_families: Names of those that did.
    """
    if job.dist_config.name != "fsdpturbo":
        return []
    faults = [*_find_custom_faults(job), *_find_ignored_faults(job)]
    if registered is None:
        rule = f"must be a family that registers its experts with the plugin fsdpturbo, which {family} does not"
        fix = f"use {' or '.join(registered_families)}, or set dist_config.name: fsdp2"
        faults.insert(0, Fault("model.name", family, rule, fix))
    return faults


def _find_custom_faults(job: Job) -> Iterator[Fault]:
    if job.dist_config.fsdp_implementation != "custom":
        return
    unable = {
        "fsdp_config.mix_precision.fp32_main_grad": job.fsdp_config.mix_precision.fp32_main_grad,
        "fsdp_config.enable_offload": job.fsdp_config.enable_offload,
        "compile.enabled": job.compile.enabled,
    }
    for path, is_on in unable.items():
        if is_on:
            rule = 'must be false with dist_config.fsdp_implementation "custom", whose hooks cannot do it'
            yield Fault(path, True, rule, "set it to false, or use dist_config.fsdp_implementation: native")
    if job.activation_checkpoint.mode == "selective_op":
        # It expects a recomputation to run the operators of the first forward, and the hooks gather in one of the two.
        rule = (
            'cannot be selective_op with dist_config.fsdp_implementation "custom", whose hooks gather inside of blocks'
        )
        fix = "use full or every_nth_block, or dist_config.fsdp_implementation: native"
        yield Fault("activation_checkpoint.mode", "selective_op", rule, fix)


def _find_ignored_faults(job: Job) -> Iterator[Fault]:
    patterns, precision = job.dist_config.fsdp_ignored_modules, job.fsdp_config.mix_precision
    if not patterns:
        return
    fix = "leave dist_config.fsdp_ignored_modules empty"
    if precision.param_dtype not in (None, job.model.init_dtype):
        rule = (
            f"must be null or model.init_dtype = {job.model.init_dtype} with dist_config.fsdp_ignored_modules = "
            f"{list(patterns)}, which nobody casts"
        )
        yield Fault("fsdp_config.mix_precision.param_dtype", precision.param_dtype, rule, fix)
    for path, is_on in {
        "fsdp_config.mix_precision.fp32_main_grad": precision.fp32_main_grad,
        "fsdp_config.enable_offload": job.fsdp_config.enable_offload,
    }.items():
        if is_on:
            rule = f"must be false with dist_config.fsdp_ignored_modules = {list(patterns)}, which FSDP does not manage"
            yield Fault(path, True, rule, f"set it to false, or {fix}")
