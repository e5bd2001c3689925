"""``fsdp_config.replicate_params``: parameters that every rank keeps whole inside an otherwise sharded unit.

torch shards every parameter of a unit over some shard axis; a shard axis of one rank is how a parameter stays whole,
with the real ranks on the replicate axis, over which its gradient is all-reduced. This file is the only one that uses
torch's private names for that: ``ShardPlacementResult``, ``HSDPMeshInfo`` and the flattening of mesh axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from torchtrain.config.nearest import suggest_fqns
from torchtrain.distributed.fsdp2.source_layout import aliases_by_parameter
from torchtrain.errors import ConfigError, Fault

_KEY = "fsdp_config.replicate_params"


def resolve_replicate_params(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Find the parameters that ``replicate_params`` names.

    Args:
        model: The final model, on any device.
        patterns: Exact fqns, or globs. Any alias of a tied parameter will do. A frozen parameter may be named: it is
            kept whole and, having no gradient, never reduced.

    Returns:
        Fqns as ``named_parameters`` gives them.

    Raises:
        ConfigError: An entry that matches nothing, with the nearest names, or names a scalar, which FSDP cannot hold;
            all of them at once.
    """
    faults: list[Fault] = []
    chosen: set[str] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_alias = {id(parameters[names[0]]): names[0] for names in aliases_by_parameter(model).values()}
    for pattern in patterns:
        matches = [fqn for fqn in parameters if fnmatchcase(fqn, pattern)]
        if not matches:
            rule = "must match a parameter of the model"
            faults.append(Fault(_KEY, pattern, rule, suggest_fqns(pattern, parameters)))
        for fqn in matches:
            if parameters[fqn].ndim == 0:
                rule = f"names the scalar {fqn}, and FSDP holds no scalars"
                faults.append(Fault(_KEY, pattern, rule, "give the parameter shape (1,), or leave the entry out"))
            chosen.add(first_alias[id(parameters[fqn])])
    if faults:
        raise ConfigError(faults)
    return frozenset(chosen)


def build_whole_placement(mesh: DeviceMesh) -> ShardPlacementResult:
    """What ``shard_placement_fn`` returns for a parameter that stays whole on the N ranks of ``mesh``.

    A mesh of shape (N, 1), N replicas of one whole shard, is derived from ``mesh`` rather than built anew: torch
    demands that all meshes of one DTensor have one root.

    Args:
        mesh: The unit's mesh, (shard) or (replicate, shard).

    Collective: the whole world, once per mesh.
    """
    names = mesh.mesh_dim_names or ()
    flat = mesh if mesh.ndim == 1 else mesh._flatten("_".join(names))
    replicated = flat._unflatten(0, (flat.size(), 1), (f"{names[-1]}_replicas", f"{names[-1]}_whole"))
    return ShardPlacementResult(Shard(0), HSDPMeshInfo(replicated, shard_mesh_dim=1, replicate_mesh_dim=0))
