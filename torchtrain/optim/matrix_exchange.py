"""Brings each logical matrix of sharded parameters whole to one rank, its owner, and the result back to its shards.

The plan is arithmetic that every rank does alike; a step then takes two all-to-alls for all matrices together, however
many there are, and none where every matrix lies whole on its owner. Replicas (HSDP) share the owners among them, so
that no matrix is worked on twice and all of them apply the same numbers.

Parameters count as stacks of matrices: a 2-D one is a stack of one. Shape legend: E matrices of M rows and N columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtrain.distributed.dtensor_internals import slices_by_coordinate
from torchtrain.optim.newton_schulz import orthogonalization_cost

Box = tuple[slice, slice, slice]


@dataclass(frozen=True)
class Layout:
    """Where the pieces of a stack lie."""

    shape_EMN: tuple[int, int, int]
    boxes: dict[int, Box]
    """What each rank holds."""
    replicas: dict[int, tuple[int, ...]]
    """Which copy each rank's piece belongs to."""


@dataclass(frozen=True)
class OwnedMatrix:
    """One matrix of one stack, and who does what for it."""

    stack: int
    index: int
    """Its place in the stack."""
    owner: int
    senders: tuple[int, ...]
    """Ranks of the owner's replica that hold a piece: the owner needs one copy."""
    holders: tuple[int, ...]
    """Ranks of all replicas that hold a piece: each gets its piece of the result."""


def describe_layout(tensor: Tensor, rank: int) -> Layout:
    """Read where a parameter lies. A plain tensor lies whole on this rank, and other ranks are not asked."""
    shape = _as_stack(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Layout(shape, {rank: _whole(shape)}, {rank: ()})
    mesh, placements = tensor.device_mesh, tensor.placements
    boxes, replicas = {}, {}
    for (coordinate, box), member in zip(slices_by_coordinate(tensor).items(), ranks_of(mesh), strict=True):
        boxes[member] = box if len(box) == 3 else (slice(0, 1), *box)
        replicas[member] = tuple(at for at, placed in zip(coordinate, placements, strict=True) if placed.is_replicate())
    return Layout(shape, boxes, replicas)


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a mesh, in the order of its coordinates."""
    return tuple(mesh.mesh.flatten().tolist())


def plan_owners(layouts: Sequence[Layout]) -> tuple[OwnedMatrix, ...]:
    """Give each matrix to one of the ranks that hold a piece of it, so that the ranks' costs come out alike.

    Greedy: matrices with the least choice first, then the dearest, each to the rank with the least work. A matrix that
    lies whole on one rank, such as a local expert, stays there.

    Returns:
        Ordered by stack, then by index; the same on every rank.
    """
    holders = [
        (stack, index, tuple(rank for rank, box in layout.boxes.items() if _holds(box, index)))
        for stack, layout in enumerate(layouts)
        for index in range(layout.shape_EMN[0])
    ]
    costs = [orthogonalization_cost(*layout.shape_EMN[1:]) for layout in layouts]
    load: dict[int, int] = defaultdict(int)
    matrices = []
    for stack, index, ranks in sorted(holders, key=lambda held: (len(held[2]), -costs[held[0]], held[:2])):
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += costs[stack]
        replicas = layouts[stack].replicas
        senders = tuple(rank for rank in ranks if replicas[rank] == replicas[owner])
        boxes = [layouts[stack].boxes[rank] for rank in senders]
        assert _tile(boxes, layouts[stack].shape_EMN), f"pieces {boxes} do not make up {layouts[stack].shape_EMN}"
        matrices.append(OwnedMatrix(stack, index, owner, senders, ranks))
    return tuple(sorted(matrices, key=lambda matrix: (matrix.stack, matrix.index)))


class MatrixExchange:
    """The exchange among the ranks of one group, for parameters that all lie on those ranks.

    Args:
        layouts: One per parameter; the same on every rank.
        rank: This rank.
        group: All ranks of the layouts; ``None`` where this rank is alone.
        dtype: In which matrices travel and arrive.
        device: Where they arrive, and travel from.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        *,
        rank: int,
        group: ProcessGroup | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        matrices = plan_owners(layouts)
        self._layouts = layouts
        self._rank, self._group, self._dtype, self._device = rank, group, dtype, device
        self._order = [rank] if group is None else dist.get_process_group_ranks(group)
        position = {member: place for place, member in enumerate(self._order)}
        self.owned = [matrix for matrix in matrices if matrix.owner == rank]
        # Pieces travel grouped by the other side's rank, in the order of the plan: both sides agree without asking.
        self._sent = sorted((m for m in matrices if rank in m.senders), key=lambda m: position[m.owner])
        self._held = sorted((m for m in matrices if rank in m.holders), key=lambda m: position[m.owner])
        self._arriving = [(m, source) for source in self._order for m in self.owned if source in m.senders]
        self._returning = [(m, target) for target in self._order for m in self.owned if target in m.holders]
        self._is_gathering = any(set(m.senders) != {m.owner} for m in matrices)
        self._is_returning = any(set(m.holders) != {m.owner} for m in matrices)

    def gather(self, locals_EMN: Sequence[Tensor]) -> list[Tensor]:
        """Bring this rank's matrices here, whole.

        Args:
            locals_EMN: This rank's part of each stack; 2-D for stacks of one.

        Returns:
            One (M, N) tensor for each of ``owned``.

        Collective: the group, unless every matrix lies whole on its owner.
        """
        pieces = [self._piece_of(locals_EMN[m.stack], m) for m in self._sent]
        received = self._swap(
            self._join(pieces),
            [(m.owner, self._numel(m, self._rank)) for m in self._sent],
            [(source, self._numel(m, source)) for m, source in self._arriving],
            is_local=not self._is_gathering,
        )
        wholes: dict[tuple[int, int], Tensor] = {}
        parts = received.split([self._numel(m, source) for m, source in self._arriving])
        for (matrix, source), part in zip(self._arriving, parts, strict=True):
            key, (_, rows, columns) = (matrix.stack, matrix.index), self._layouts[matrix.stack].boxes[source]
            shape_MN = self._layouts[matrix.stack].shape_EMN[1:]
            if len(matrix.senders) == 1:
                wholes[key] = part.view(shape_MN)
                continue
            if key not in wholes:
                wholes[key] = received.new_empty(shape_MN)
            wholes[key][rows, columns] = part.view(_length(rows), _length(columns))
        return [wholes[matrix.stack, matrix.index] for matrix in self.owned]

    def scatter(
        self, wholes_MN: Sequence[Tensor], locals_EMN: Sequence[Tensor]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Bring the pieces of the owners' results to the ranks that hold those pieces.

        Args:
            wholes_MN: One for each of ``owned``.
            locals_EMN: What the pieces belong to; all on one device.

        Yields:
            For each matrix of which this rank holds a piece: index of its stack, its view in the local tensor, and
            the piece of the result for it, which has the exchange's dtype and lies where the local tensor does.

        Collective: the group, unless every matrix lies whole on its owner and nowhere else.
        """
        whole_of = {(m.stack, m.index): whole for m, whole in zip(self.owned, wholes_MN, strict=True)}
        pieces = []
        for matrix, target in self._returning:
            _, rows, columns = self._layouts[matrix.stack].boxes[target]
            pieces.append(whole_of[matrix.stack, matrix.index][rows, columns])
        received = self._swap(
            self._join(pieces),
            [(target, self._numel(m, target)) for m, target in self._returning],
            [(m.owner, self._numel(m, self._rank)) for m in self._held],
            is_local=not self._is_returning,
        )
        # With offload one copy to the host, however many matrices there are.
        received = received.to(locals_EMN[0].device)
        parts = received.split([self._numel(m, self._rank) for m in self._held])
        for matrix, part in zip(self._held, parts, strict=True):
            target = self._piece_of(locals_EMN[matrix.stack], matrix)
            yield matrix.stack, target, part.view(target.shape)

    def _piece_of(self, local: Tensor, matrix: OwnedMatrix) -> Tensor:
        return (
            local if local.ndim == 2 else local[matrix.index - self._layouts[matrix.stack].boxes[self._rank][0].start]
        )

    def _numel(self, matrix: OwnedMatrix, rank: int) -> int:
        _, rows, columns = self._layouts[matrix.stack].boxes[rank]
        return _length(rows) * _length(columns)

    def _join(self, pieces: Sequence[Tensor]) -> Tensor:
        if not pieces:
            return torch.empty(0, dtype=self._dtype, device=self._device)
        # Joined where they lie: with offload one copy to the device, however many matrices there are.
        return torch.cat([piece.to(self._dtype).reshape(-1) for piece in pieces]).to(self._device)

    def _swap(
        self, sent: Tensor, outgoing: Sequence[tuple[int, int]], incoming: Sequence[tuple[int, int]], *, is_local: bool
    ) -> Tensor:
        if is_local:
            return sent
        sizes = [[sum(size for rank, size in ends if rank == m) for m in self._order] for ends in (incoming, outgoing)]
        received = sent.new_empty(sum(sizes[0]))
        dist.all_to_all_single(received, sent, *sizes, group=self._group)
        return received


def _as_stack(shape: torch.Size) -> tuple[int, int, int]:
    rows, columns = shape[-2:]
    return (shape[0] if len(shape) == 3 else 1, rows, columns)


def _whole(shape_EMN: tuple[int, int, int]) -> Box:
    matrices, rows, columns = shape_EMN
    return slice(0, matrices), slice(0, rows), slice(0, columns)


def _tile(boxes: Sequence[Box], shape_EMN: tuple[int, int, int]) -> bool:
    """Whether pieces of one matrix form a grid that covers it once; layouts shard dims, so other tilings are none."""
    _, num_rows, num_columns = shape_EMN
    rows = {(rows.start, rows.stop) for _, rows, _ in boxes}
    columns = {(columns.start, columns.stop) for _, _, columns in boxes}
    cells = {(rows.start, columns.start) for _, rows, columns in boxes}
    is_grid = len(cells) == len(boxes) == len(rows) * len(columns)
    return is_grid and _follow_one_another(rows, num_rows) and _follow_one_another(columns, num_columns)


def _follow_one_another(parts: set[tuple[int, int]], size: int) -> bool:
    starts, stops = zip(*sorted(parts), strict=True)
    return (*starts, size) == (0, *stops)


def _holds(box: Box, index: int) -> bool:
    matrices, rows, columns = box
    return matrices.start <= index < matrices.stop and _length(rows) > 0 and _length(columns) > 0


def _length(part: slice) -> int:
    return part.stop - part.start
