"""Muon: steps along the orthogonalised momentum of matrices; AdamW for everything else.

Sharded parameters are stepped as the whole matrices that they are parts of. Momentum lies where the parameter's shard
lies, in its dtype. Not for deciding which parameter goes where: see ``parameter_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.optim.matrix_exchange import MatrixExchange, describe_layout, ranks_of
from torchtrain.optim.newton_schulz import orthogonalize_all

_NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Exchanged:
    """Parameters that lie on the same ranks, and the exchange among those."""

    parameters: list[nn.Parameter]
    exchange: MatrixExchange


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay and updates of AdamW's size, so that one learning rate serves both.

    Args:
        params: Parameters, or groups of them. A group with ``algorithm: "adamw"`` is stepped by AdamW; in the others
            every parameter must be a matrix or a stack of matrices ``[E, M, N]``, which counts as E matrices.
        lr: Learning rate.
        weight_decay: Decoupled, times the learning rate.
        momentum: Decay of the momentum.
        nesterov: Look one step ahead along the momentum.
        ns_steps: Newton-Schulz iterations.
        ns_dtype: ``float32`` or ``bfloat16``, in which matrices travel and are orthogonalised. Null is float32 on CPUs,
            many of which multiply bfloat16 slowly, and bfloat16 on accelerators.
        betas: AdamW's.
        eps: AdamW's.
        fused: AdamW's.

    Raises:
        ValueError: A value is out of range, or a parameter is no matrix.

    Collective: the ranks that hold pieces of a parameter; where they have no process group yet, one is made.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
        Scalable for LLM Training", section 2.2 for the size of updates and the weight decay.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 3e-4,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: str | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        _check(lr=lr, weight_decay=weight_decay, momentum=momentum, ns_steps=ns_steps, ns_dtype=ns_dtype)
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        super().__init__(params, {**defaults, "algorithm": "muon"})
        self._ns_steps = ns_steps
        self._ns_dtype = ns_dtype
        for group in self.param_groups:
            if group["algorithm"] not in ("muon", "adamw"):
                raise ValueError(f'algorithm must be "muon" or "adamw", not {group["algorithm"]!r}')
        self._process_groups: dict[tuple[int, ...], ProcessGroup] = {}
        matrices = [parameter for group in self._groups("muon") for parameter in group["params"]]
        for parameter in matrices:
            _check_parameter(parameter)
        # Now rather than in a step, whichever parameters will have gradients; a mesh of one axis has a group to lend.
        for parameter in sorted(matrices, key=lambda p: p.device_mesh.ndim if isinstance(p, DTensor) else 0):
            self._group_of(parameter)
        adamw_groups = self._groups("adamw")
        # Steps the very groups and states of this optimizer.
        self._adamw = torch.optim.AdamW(adamw_groups, lr, betas, eps, fused=fused) if adamw_groups else None
        self._planned: list[nn.Parameter] = []
        self._plan: list[_Exchanged] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """Update every parameter that has a gradient.

        Collective: the ranks that hold pieces of a matrix; all of them must have gradients for the same parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = {p: group for group in self._groups("muon") for p in group["params"] if p.grad is not None}
        if not _are_same(self._planned, list(groups)):
            self._planned, self._plan = list(groups), self._plan_exchanges(list(groups))
        for exchanged in self._plan:
            self._step_matrices(exchanged, groups)
        if self._adamw is not None:
            # load_state_dict replaces both.
            self._adamw.param_groups, self._adamw.state = self._groups("adamw"), self.state
            self._adamw.step()
        return loss

    def _groups(self, algorithm: str) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["algorithm"] == algorithm]

    def _step_matrices(self, exchanged: _Exchanged, groups: dict[nn.Parameter, dict[str, Any]]) -> None:
        parameters, exchange = exchanged.parameters, exchanged.exchange
        matrices = exchange.gather([self._direction(parameter, groups[parameter]) for parameter in parameters])
        updates = orthogonalize_all(matrices, steps=self._ns_steps)
        locals_ = [_local(parameter) for parameter in parameters]
        for local, parameter in zip(locals_, parameters, strict=True):
            local.mul_(1.0 - groups[parameter]["lr"] * groups[parameter]["weight_decay"])
        for index, target, update in exchange.scatter(updates, locals_):
            # An orthogonal update has RMS 1 / sqrt(max(M, N)); this factor gives it the 0.2 that AdamW's usually has.
            # Source: Liu et al. 2025, section 2.2.
            rms_factor = 0.2 * max(parameters[index].shape[-2:]) ** 0.5
            target.add_(update, alpha=-groups[parameters[index]]["lr"] * rms_factor)

    def _direction(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Add this rank's gradient to its momentum; returns what is to be orthogonalised."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        momentum = _local(state["momentum_buffer"])
        assert parameter.grad is not None  # step chose those that have one
        gradient = _local(parameter.grad).to(momentum.dtype)
        momentum.lerp_(gradient, 1.0 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _plan_exchanges(self, parameters: Sequence[nn.Parameter]) -> list[_Exchanged]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in parameters:
            by_ranks.setdefault(_ranks_of(parameter), []).append(parameter)
        plan = []
        for ranks, members in by_ranks.items():
            meshes = [p.device_mesh for p in members if isinstance(p, DTensor)]
            # With offload the shards lie on the CPU, but the device of the mesh multiplies matrices.
            device = torch.device(meshes[0].device_type) if meshes else members[0].device
            exchange = MatrixExchange(
                [describe_layout(parameter, rank) for parameter in members],
                rank=rank,
                group=self._group_of(members[0]) if len(ranks) > 1 else None,
                dtype=self._resolve_ns_dtype(device),
                device=device,
            )
            plan.append(_Exchanged(members, exchange))
        return plan

    def _group_of(self, parameter: nn.Parameter) -> ProcessGroup | None:
        """The group of the ranks that a parameter lies on, made once where there is none; ``None`` for one rank."""
        ranks = _ranks_of(parameter)
        if len(ranks) == 1:
            return None
        if ranks not in self._process_groups:
            assert isinstance(parameter, DTensor)
            self._process_groups[ranks] = _find_group(parameter.device_mesh, len(ranks)) or cast(
                ProcessGroup, dist.new_group(list(ranks), use_local_synchronization=True)
            )
        return self._process_groups[ranks]

    def _resolve_ns_dtype(self, device: torch.device) -> torch.dtype:
        if self._ns_dtype is not None:
            return _NS_DTYPES[self._ns_dtype]
        return torch.float32 if device.type == "cpu" else torch.bfloat16


def _check(*, lr: float, weight_decay: float, momentum: float, ns_steps: int, ns_dtype: str | None) -> None:
    if lr < 0 or weight_decay < 0:
        raise ValueError(f"lr and weight_decay must be at least 0, not {lr} and {weight_decay}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
    if ns_steps < 1:
        raise ValueError(f"ns_steps must be at least 1, not {ns_steps}")
    if ns_dtype is not None and ns_dtype not in _NS_DTYPES:
        raise ValueError(f"ns_dtype must be null or one of {', '.join(_NS_DTYPES)}, not {ns_dtype!r}")


def _check_parameter(parameter: nn.Parameter) -> None:
    if parameter.ndim not in (2, 3):
        raise ValueError(f"Muon steps matrices and stacks of them, not a parameter of shape {list(parameter.shape)}")
    if isinstance(parameter, DTensor) and any(placement.is_partial() for placement in parameter.placements):
        raise ValueError(f"Muon cannot step a parameter that is a sum over ranks: {parameter.placements}")


def _ranks_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Ranks that a parameter lies on, in order; this one alone for a plain tensor."""
    if isinstance(parameter, DTensor):
        return tuple(sorted(ranks_of(parameter.device_mesh)))
    return (dist.get_rank() if dist.is_initialized() else 0,)


def _find_group(mesh: DeviceMesh, num_ranks: int) -> ProcessGroup | None:
    if mesh.ndim == 1:
        return mesh.get_group()
    world = dist.group.WORLD
    return world if world is not None and num_ranks == world.size() else None


def _are_same(some: Sequence[nn.Parameter], others: Sequence[nn.Parameter]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others, strict=True))


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
