"""Rules of section ``optimizer``: which classes may be imported, which cannot train here, and who has a fused kernel.

Not for building one: that is ``optim.build``. Classes are known by their name, so that nothing has to be imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields

from torchtrain.config.optimization import OptimizerConfig
from torchtrain.errors import Fault

DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_OWN_PREFIXES = ("torchtrain", "torch.optim")
_KEYS = {field.name for field in fields(OptimizerConfig)}
_ADAMW = "use torch.optim.AdamW"
# Refused on one rank too: a job that trains there should train on more. Name: (why, what instead).
_UNUSABLE = {
    "SparseAdam": ("needs sparse gradients, and there are only dense ones", "use torch.optim.Adam"),
    "LBFGS": ("needs a closure that computes the loss again within a step, which a step does not give it", _ADAMW),
    "Adafactor": ("keeps norms of rows and columns that torch does not compute on sharded parameters", _ADAMW),
    "Rprop": ("masks gradients by index, which torch does not do on sharded parameters", _ADAMW),
    "Muon": ("takes matrices only, and each shard for a whole one", "use torchtrain.optim.muon.Muon"),
}
# Those whose fused kernel takes parameters that are DTensors; torch has it for SGD and Adagrad on plain tensors only.
_FUSED_ON_SHARDS = ("Adam", "AdamW")


def find_optimizer_faults(config: OptimizerConfig) -> Iterator[Fault]:
    """The faults of values that are read as they should."""
    for index, beta in enumerate(config.betas):
        if not 0 <= beta < 1:
            fix = "use for example 0.9 and 0.95"
            yield Fault(f"optimizer.betas.{index}", beta, "must be at least 0 and below 1", fix)
    yield from find_option_faults(config)
    yield from find_unusable_faults(config.target)


def find_option_faults(config: OptimizerConfig) -> Iterator[Fault]:
    """The options that are no extra ones: the section has a key for them, or they are not the user's to give."""
    for name, value in config.options.items():
        if name in _KEYS or name == "params":
            fix = "remove it" if name == "params" else f"set optimizer.{name}"
            yield Fault(f"optimizer.options.{name}", value, "is not an extra option", fix)


def find_unusable_faults(target: str) -> Iterator[Fault]:
    """The fault of a class of ``torch.optim`` that cannot train a sharded model, if ``target`` is one."""
    name = target.rpartition(".")[2]
    if target.startswith("torch.optim.") and name in _UNUSABLE:
        why, instead = _UNUSABLE[name]
        yield Fault("optimizer._target_", target, why, instead)


def has_fused_step_on_shards(target: str) -> bool:
    """Whether a class of ours or of ``torch.optim`` can be fused where parameters are DTensors."""
    return target.startswith("torchtrain.") or target.rpartition(".")[2] in _FUSED_ON_SHARDS


def find_fused_faults(config: OptimizerConfig) -> Iterator[Fault]:
    """The fault of ``optimizer.fused`` where parameters are sharded, if it has one."""
    if config.fused and config.target.startswith("torch.optim.") and not has_fused_step_on_shards(config.target):
        rule = f"must be false or null for {config.target} on sharded parameters, for which torch has no such kernel"
        yield Fault("optimizer.fused", True, rule, "leave it out, or use torch.optim.AdamW or torch.optim.Adam")


def find_target_faults(target: str, trusted_targets: Sequence[str]) -> Iterator[Fault]:
    """The fault of an ``optimizer._target_`` that may not be imported, if it has one."""
    if not DOTTED_NAME.fullmatch(target) or "." not in target:
        yield Fault("optimizer._target_", target, "must be a dotted class name", "write for example torch.optim.AdamW")
    elif not any(target.startswith(f"{prefix.removesuffix('.')}.") for prefix in (*_OWN_PREFIXES, *trusted_targets)):
        package = target.rpartition(".")[0]
        yield Fault(
            "optimizer._target_",
            target,
            "must be a class under torchtrain., torch.optim. or one of trusted_targets",
            f"use torch.optim.AdamW, or trust that code with trusted_targets: [{package}]",
        )
