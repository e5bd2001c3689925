"""Which parameters get weight decay, and which of them Muon leaves to AdamW: by patterns of their fqns.

A tied parameter is one parameter with several names; a pattern may mean any of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.config.nearest import nearest_name
from torchtrain.errors import Fault

MUON_GROUPING_OPTIONS = ("adamw_params", "adamw_lr")
"""Options of a Muon job that are about groups; the others are arguments of the class."""
ADAMW_PARAMS = (
    "*embed_tokens.weight",
    "*lm_head.weight",
    "*norm.weight",
    "*.bias",
    "*conv1d.weight",
    "*.A_log",
    "*.dt_bias",
)
"""What Muon leaves to AdamW unless told: what is no matrix, and matrices whose rows are looked up or are classes.
Source: Jordan et al. 2024."""

Group = dict[str, Any]
_MUON_NDIMS = (2, 3)


def names_of_trainable(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """List all fqns of each trainable parameter, in the model's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(fqn)
    return names


def group_by_decay(names: dict[nn.Parameter, list[str]], no_decay: Sequence[str], *, has_decay: bool) -> list[Group]:
    """Split parameters into one group that decays and one that does not; none where it would be empty.

    Args:
        names: As ``names_of_trainable`` listed them; patterns are about the first name.
        no_decay: Patterns of what does not decay.
        has_decay: Whether the optimizer knows ``weight_decay``.
    """
    exempt = {parameter for parameter, fqns in names.items() if _matches(fqns[:1], no_decay)}
    decay = {"params": [parameter for parameter in names if parameter not in exempt]}
    no_decay_group: Group = {"params": [parameter for parameter in names if parameter in exempt]}
    if has_decay:
        no_decay_group["weight_decay"] = 0.0
    # An empty group is legal for torch, but cannot be told from another empty group in a checkpoint.
    return [group for group in (decay, no_decay_group) if group["params"]]


def group_for_muon(
    groups: Sequence[Group],
    names: dict[nn.Parameter, list[str]],
    *,
    adamw_params: Sequence[str] | None,
    adamw_lr: float | None,
    lr: float,
) -> list[Group]:
    """Split each group into what Muon steps and what AdamW does.

    Args:
        groups: As ``group_by_decay`` made them.
        names: As ``names_of_trainable`` listed them.
        adamw_params: Patterns of what AdamW steps; ``None`` is ``ADAMW_PARAMS``.
        adamw_lr: AdamW's peak learning rate; ``None`` is ``lr``. It follows the same schedule.
        lr: Muon's peak learning rate.
    """
    patterns = ADAMW_PARAMS if adamw_params is None else adamw_params
    adamw = {parameter for parameter, fqns in names.items() if _matches(fqns, patterns)}
    rate = {} if adamw_lr is None else {"lr": adamw_lr, "lr_multiplier": adamw_lr / lr}
    split = []
    for group in groups:
        muon_group = {**group, "params": [p for p in group["params"] if p not in adamw], "algorithm": "muon"}
        adamw_group = {**group, "params": [p for p in group["params"] if p in adamw], "algorithm": "adamw", **rate}
        split += [muon_group, adamw_group]
    return [group for group in split if group["params"]]


def split_by_mesh(groups: Sequence[Group]) -> list[Group]:
    """Split each group into one per device mesh, with the same hyperparameters.

    With tensor parallelism parameters lie on meshes with and without the tp axis, and torch's kernels for many tensors
    take those of one mesh in a call.
    """
    split = []
    for group in groups:
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
        split += [{**group, "params": parameters} for parameters in by_mesh.values()]
    return split


def find_muon_faults(
    names: dict[nn.Parameter, list[str]], *, adamw_params: object, adamw_lr: object, lr: float
) -> list[Fault]:
    """Check what a job says about the groups: patterns match, parameters are covered, and Muon has something to do."""
    path = "optimizer.options.adamw_params"
    faults = []
    if adamw_lr is not None and not (isinstance(adamw_lr, int | float) and adamw_lr > 0 and lr > 0):
        fix = "leave it out to use optimizer.lr"
        faults.append(Fault("optimizer.options.adamw_lr", adamw_lr, "must be a number above 0, as optimizer.lr", fix))
    patterns: list[str] | tuple[str, ...] = ADAMW_PARAMS
    if adamw_params is not None:
        if not (isinstance(adamw_params, list | tuple) and all(isinstance(pattern, str) for pattern in adamw_params)):
            return [
                *faults,
                Fault(path, adamw_params, "must be a list of fqn patterns", 'write for example ["*.bias"]'),
            ]
        patterns = adamw_params
        faults += find_unmatched_patterns(path, patterns, [fqn for fqns in names.values() for fqn in fqns])
    for_muon = {parameter: fqns for parameter, fqns in names.items() if not _matches(fqns, patterns)}
    for parameter, (fqn, *_) in for_muon.items():
        if parameter.ndim not in _MUON_NDIMS:
            rule = f"leaves {fqn} of shape {list(parameter.shape)} to Muon, which steps matrices and stacks of them"
            faults.append(Fault(path, list(patterns), rule, f'add "{fqn}", or a pattern that matches it'))
    if not for_muon:
        rule = "leaves no parameter to Muon"
        faults.append(Fault(path, list(patterns), rule, "set optimizer._target_ to torch.optim.AdamW"))
    return faults


def find_unmatched_patterns(path: str, patterns: Sequence[str], fqns: Sequence[str]) -> list[Fault]:
    """Find patterns that a user wrote for nothing."""
    faults = []
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in fqns):
            nearest = nearest_name(pattern, fqns)
            fix = f"did you mean {nearest}?" if nearest else "correct or remove it"
            faults.append(Fault(path, pattern, "must match a trainable parameter", fix))
    return faults


def _matches(fqns: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(fqn, pattern) for fqn in fqns for pattern in patterns)
