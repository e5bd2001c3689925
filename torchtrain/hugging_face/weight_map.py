"""Which tensors on disk a parameter is made of: rows of data that a family lists, and their resolution.

A row knows names and boxes, not values: reading and writing stand in ``torchtrain.checkpoint``. No torch.

In a row's names ``{layer}`` stands for any number, the same on both sides, and ``{expert}`` for every expert in turn.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Protocol

Shape = tuple[int, ...]
Box = tuple[slice, ...]
"""Start and stop in each dim of a tensor."""


@dataclass(frozen=True)
class Piece:
    """A box of one of our tensors, and the box of the tensor on disk that holds its values."""

    disk_name: str
    ours: Box
    disk: Box
    """One dim fewer than ``ours`` where a tensor on disk is one entry of our stack."""
    disk_shape: Shape
    """Of the whole tensor on disk."""


class Row(Protocol):
    """One line of a weight map."""

    def pieces(self, fqn: str, shapes: Mapping[str, Shape]) -> tuple[Piece, ...] | None:
        """Cover a parameter with pieces.

        Args:
            fqn: The parameter.
            shapes: Global shape by fqn, of everything that the row may combine.

        Returns:
            Pieces that cover it exactly once; ``None`` where the row is not about it.
        """
        ...


@dataclass(frozen=True)
class Renamed:
    """One tensor here is one tensor there."""

    ours: str
    disk: str

    def pieces(self, fqn: str, shapes: Mapping[str, Shape]) -> tuple[Piece, ...] | None:
        """See ``Row``."""
        name = _translate(fqn, self.ours, self.disk)
        if name is None:
            return None
        whole = whole_box(shapes[fqn])
        return (Piece(name, whole, whole, shapes[fqn]),)


@dataclass(frozen=True)
class Stacked:
    """Each entry of dim 0 here, an expert, is a tensor of its own there."""

    ours: str
    disk: str

    def pieces(self, fqn: str, shapes: Mapping[str, Shape]) -> tuple[Piece, ...] | None:
        """See ``Row``."""
        name = _translate(fqn, self.ours, self.disk)
        if name is None:
            return None
        num_experts, *rest = shapes[fqn]
        inner = whole_box(tuple(rest))
        return tuple(
            Piece(name.replace("{expert}", str(expert)), (slice(expert, expert + 1), *inner), inner, tuple(rest))
            for expert in range(num_experts)
        )


@dataclass(frozen=True)
class Fused:
    """Several tensors here lie behind one another in one there."""

    ours: tuple[str, ...]
    """In the order on disk."""
    disk: str
    dim: int
    """Along which they lie."""

    def pieces(self, fqn: str, shapes: Mapping[str, Shape]) -> tuple[Piece, ...] | None:
        """See ``Row``."""
        for pattern in self.ours:
            name = _translate(fqn, pattern, self.disk)
            if name is not None:
                parts = [str(_translate(fqn, pattern, part)) for part in self.ours]
                return self._piece(fqn, name, parts, shapes)
        return None

    def _piece(self, fqn: str, name: str, parts: list[str], shapes: Mapping[str, Shape]) -> tuple[Piece, ...] | None:
        if any(part not in shapes for part in parts):
            return None
        sizes = [shapes[part][self.dim] for part in parts]
        start = sum(sizes[: parts.index(fqn)])
        disk_shape = list(shapes[fqn])
        disk_shape[self.dim] = sum(sizes)
        whole = whole_box(shapes[fqn])
        disk = list(whole)
        disk[self.dim] = slice(start, start + shapes[fqn][self.dim])
        return (Piece(name, whole, tuple(disk), tuple(disk_shape)),)


@dataclass(frozen=True)
class WeightMap:
    """A family's rows."""

    rows: tuple[Row, ...]
    """Of several about one parameter the first is what is written; reading takes the first whose tensors are there."""
    ignored: tuple[str, ...] = ()
    """Names on disk that hold nothing of a model, such as buffers that old versions saved."""
    ignored_prefixes: tuple[str, ...] = ()
    """How names begin of other parts that may lie beside the model, such as the encoder of a multimodal one."""

    def layouts(self, fqn: str, shapes: Mapping[str, Shape]) -> Iterator[tuple[Piece, ...]]:
        """Yield each way in which a parameter may lie on disk, the one that is written first."""
        for row in self.rows:
            pieces = row.pieces(fqn, shapes)
            if pieces is not None:
                yield pieces

    def find_stored(self, fqn: str, shapes: Mapping[str, Shape], names: Collection[str]) -> tuple[Piece, ...] | None:
        """Return the first layout of which every tensor is on disk; ``None`` where there is none."""
        for pieces in self.layouts(fqn, shapes):
            if all(piece.disk_name in names for piece in pieces):
                return pieces
        return None

    def nearest_layout(self, fqn: str, shapes: Mapping[str, Shape], names: Sequence[str]) -> tuple[Piece, ...]:
        """Return the layout that looks most like what is on disk, to say by its names what is missing there.

        Args:
            fqn: The parameter.
            shapes: As for ``Row.pieces``.
            names: On disk, sorted.

        Returns:
            Nothing where no row is about the parameter.
        """

        def num_shared(pieces: tuple[Piece, ...]) -> int:
            # In sorted order the name that begins most alike is a neighbour.
            name = pieces[0].disk_name
            place = bisect(names, name)
            return max((_num_shared_parts(name, near) for near in names[max(0, place - 1) : place + 1]), default=0)

        return max(self.layouts(fqn, shapes), key=num_shared, default=())

    def is_ignored(self, disk_name: str) -> bool:
        """Whether a tensor on disk may be left unread."""
        return disk_name.startswith(self.ignored_prefixes) or any(
            _translate(disk_name, pattern, "") is not None for pattern in self.ignored
        )


def whole_box(shape: Shape) -> Box:
    """Return the box that is the whole tensor."""
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class Overlap:
    """What a box of our tensor and a piece have in common."""

    ours: Box
    """Relative to the box."""
    disk: Box
    """Of the tensor on disk."""


def intersect(piece: Piece, box: Box) -> Overlap | None:
    """Find what a box, such as a rank's share of a parameter, has of a piece; ``None`` where that is nothing."""
    ours, disk = [], []
    stacked = len(piece.ours) - len(piece.disk)
    for dim, (part, owned) in enumerate(zip(piece.ours, box, strict=True)):
        start, stop = max(part.start, owned.start), min(part.stop, owned.stop)
        if start >= stop:
            return None
        ours.append(slice(start - owned.start, stop - owned.start))
        if dim >= stacked:
            shift = piece.disk[dim - stacked].start - part.start
            disk.append(slice(start + shift, stop + shift))
    return Overlap(tuple(ours), tuple(disk))


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def _translate(name: str, pattern: str, target: str) -> str | None:
    match = _compiled(pattern).fullmatch(name)
    return None if match is None else target.replace("{layer}", match.groupdict().get("layer", ""))


def _num_shared_parts(name: str, other: str) -> int:
    pairs = zip(name.split("."), other.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
