"""Which tokens of a sequence each rank of the cp axis holds, and in which order.

Shape legend: T = tokens of one rank, S = tokens of the whole sequence = T x cp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchtrain.config.parallel import CpMode


@dataclass(frozen=True)
class SequenceLayout:
    """One rank's share of a sequence.

    Contiguous: rank i of n holds the i-th of n equal pieces. Head-tail: the sequence is cut into 2n pieces and rank i
    holds pieces i and 2n - 1 - i, in this order, so that the causal mask gives every rank equally many pairs.
    """

    cp_size: int
    cp_rank: int
    is_head_tail: bool

    @property
    def pieces(self) -> tuple[int, ...]:
        """The pieces of this rank, in sequence order."""
        return (self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank) if self.is_head_tail else (self.cp_rank,)

    @property
    def num_pieces(self) -> int:
        """Pieces of the whole sequence; its length must be a multiple of it."""
        return self.cp_size * (2 if self.is_head_tail else 1)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """Cut this rank's tokens out of a tensor that holds the whole sequence along ``dim``."""
        size = x.shape[dim]
        if size % self.num_pieces:
            raise ValueError(f"{size} tokens do not divide into {self.num_pieces} pieces")
        length = size // self.num_pieces
        pieces = [x.narrow(dim, piece * length, length) for piece in self.pieces]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def of_rank(self, cp_rank: int) -> SequenceLayout:
        """The share of another rank of the axis."""
        return SequenceLayout(self.cp_size, cp_rank, self.is_head_tail)

    def restore(self, x: Tensor, dim: int = 1) -> Tensor:
        """Bring back sequence order.

        Args:
            x: The shares of all ranks along ``dim``, concatenated in rank order.
            dim: The sequence.
        """
        shares = x.chunk(self.cp_size, dim)
        pieces: dict[int, Tensor] = {}
        for rank, share in enumerate(shares):
            numbers = self.of_rank(rank).pieces
            pieces |= dict(zip(numbers, share.chunk(len(numbers), dim), strict=True))
        return torch.cat([pieces[number] for number in sorted(pieces)], dim)


def resolve_sequence_layout(mode: CpMode, cp_size: int, cp_rank: int) -> SequenceLayout:
    """Say how ``accelerator.cp_mode`` lays out a sequence: only the ring profits from a balanced mask."""
    return SequenceLayout(cp_size, cp_rank, is_head_tail=mode == "ring" and cp_size > 1)
