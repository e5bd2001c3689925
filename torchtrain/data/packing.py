"""Cut sequence ``i`` out of a flat stream of documents: index arithmetic, no state, no loop over tokens.

Two layouts, one job:

- ``PackedLayout``: windows over the stream. Window ``i`` reads the ``T + 1`` tokens from ``i * T`` on; it predicts
  tokens ``i * T + 1 … i * T + T``, so that windows predict every token once (but for the stream's first, and a tail
  shorter than a window).
- ``PaddedLayout``: each document is cut by itself in the same way; its last sequence is padded at the end.

Document ids, positions and ignored labels all come from one thing, the bounds of the segments of a sequence, and so
cannot disagree. With ``document_aware`` a label is ignored where it would be predicted from another document: the
token after EOS is no business of the document that ended. Without it a packed sequence is one plain causal stream.

Padding is a segment of its own, ignored as label; being at the end, no real token attends to it even without document
ids.

Shapes: T tokens of a sequence (``training.seq_len``), S segments of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from torchtrain.losses.cross_entropy import IGNORE_INDEX

PADDING_ID = 0
"""Token at places that nothing is computed for; any id that every vocabulary has."""


@dataclass(frozen=True)
class TokenSequence:
    """One sequence, as ``Batch`` holds several.

    Shapes:
        input_ids_T, labels_T, positions_T: int64.
        document_ids_T: int32, or ``None`` for plain causal attention.
    """

    input_ids_T: NDArray[np.int64]
    labels_T: NDArray[np.int64]
    positions_T: NDArray[np.int64]
    document_ids_T: NDArray[np.int32] | None
    source_id: int


class DocumentStream(Protocol):
    """Documents one after the other, as ``TokenCache`` maps them from disk."""

    @property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """The tokens of all documents."""
        ...

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where each document begins in ``tokens``, then where the last one ends."""
        ...


class SequenceLayout(Protocol):
    """All sequences of one source, by index."""

    def __len__(self) -> int:
        """Count the sequences."""
        ...

    def read(self, index: int) -> TokenSequence:
        """Assemble one sequence."""
        ...


@dataclass(frozen=True)
class PackedLayout:
    """Full windows over the stream of all documents."""

    stream: DocumentStream
    seq_len: int
    document_aware: bool
    source_id: int

    def __len__(self) -> int:
        """Count the windows."""
        return max(len(self.stream.tokens) - 1, 0) // self.seq_len

    def read(self, index: int) -> TokenSequence:
        """Assemble window ``index``."""
        start = index * self.seq_len
        stop = start + self.seq_len + 1
        if not self.document_aware:
            return _assemble(self.stream.tokens[start:stop], None, self.seq_len, self.source_id)
        # The documents that the window touches: from the last one to begin at or before its start.
        first = np.searchsorted(self.stream.offsets, start, side="right") - 1
        last = np.searchsorted(self.stream.offsets, stop, side="left")
        bounds = np.clip(self.stream.offsets[first : last + 1], start, stop) - start
        return _assemble(self.stream.tokens[start:stop], bounds, self.seq_len, self.source_id)


@dataclass(frozen=True)
class PaddedLayout:
    """Each document in sequences of its own, the last one padded."""

    stream: DocumentStream
    first_sequence: NDArray[np.int64]
    """Index of each document's first sequence, then the number of all."""
    seq_len: int
    document_aware: bool
    source_id: int

    def __len__(self) -> int:
        """Count the sequences."""
        return int(self.first_sequence[-1])

    def read(self, index: int) -> TokenSequence:
        """Assemble sequence ``index``."""
        document = np.searchsorted(self.first_sequence, index, side="right") - 1
        start = self.stream.offsets[document] + (index - self.first_sequence[document]) * self.seq_len
        stop = min(start + self.seq_len + 1, self.stream.offsets[document + 1])
        length = int(stop - start)
        bounds = np.array([0, length, self.seq_len + 1]) if self.document_aware else None
        return _assemble(self.stream.tokens[start:stop], bounds, self.seq_len, self.source_id)


def build_layout(
    stream: DocumentStream,
    *,
    seq_len: int,
    packing: bool,
    document_aware: bool,
    source_id: int,
) -> SequenceLayout:
    """Lay the sequences of one source over its tokens, as section ``dataset`` says."""
    if packing:
        return PackedLayout(stream, seq_len, document_aware, source_id)
    # A document of n tokens predicts n - 1; one of a single token predicts nothing and gives no sequence.
    num_predicted = np.maximum(np.diff(stream.offsets) - 1, 0)
    sequences_per_document = -(-num_predicted // seq_len)
    first_sequence = np.concatenate([[0], np.cumsum(sequences_per_document)])
    return PaddedLayout(stream, first_sequence, seq_len, document_aware, source_id)


def build_padding_sequence(seq_len: int, *, document_aware: bool) -> TokenSequence:
    """Make a sequence with nothing to learn, for a rank whose share of an evaluation has run out."""
    bounds = np.array([0, 0, seq_len + 1]) if document_aware else None
    return _assemble(np.empty(0, np.uint16), bounds, seq_len, source_id=0)


def _assemble(
    tokens: NDArray[np.unsignedinteger], bounds_S: NDArray[np.int64] | None, seq_len: int, source_id: int
) -> TokenSequence:
    """Turn up to ``seq_len + 1`` tokens into a sequence.

    Args:
        tokens: The tokens of one window; what is missing at the end is padding.
        bounds_S: Where segments begin and end in the window, from 0 to ``seq_len + 1``; ``None`` for a plain stream.
        seq_len: T.
        source_id: Index of the source.
    """
    window = np.full(seq_len + 1, PADDING_ID, np.int64)
    window[: len(tokens)] = tokens
    labels_T = window[1:].copy()
    labels_T[max(len(tokens) - 1, 0) :] = IGNORE_INDEX
    places = np.arange(seq_len + 1)
    if bounds_S is None:
        return TokenSequence(window[:-1], labels_T, places[:-1], None, source_id)
    lengths_S = np.diff(bounds_S)
    documents = np.repeat(np.arange(len(lengths_S), dtype=np.int32), lengths_S)
    positions = places - np.repeat(bounds_S[:-1], lengths_S)
    labels_T[documents[1:] != documents[:-1]] = IGNORE_INDEX
    return TokenSequence(window[:-1], labels_T, positions[:-1], documents[:-1], source_id)
