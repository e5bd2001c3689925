"""Both layouts against a reference that walks token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from torchtrain.data.packing import (
    PADDING_ID,
    SequenceLayout,
    TokenSequence,
    build_layout,
    build_padding_sequence,
)

IGNORED = -100
DOCUMENTS = st.lists(st.integers(min_value=1, max_value=12), min_size=1, max_size=8)
SEQ_LENS = st.integers(min_value=1, max_value=7)


@dataclass(frozen=True)
class Stream:
    tokens: NDArray[np.uint16]
    offsets: NDArray[np.int64]


def make_stream(lengths: list[int]) -> Stream:
    """Tokens that are all different, so that each tells where it stood."""
    return Stream(np.arange(1, sum(lengths) + 1, dtype=np.uint16), np.concatenate([[0], np.cumsum(lengths)]))


def make_layout(lengths: list[int], seq_len: int, *, packing: bool, document_aware: bool = True) -> SequenceLayout:
    return build_layout(
        make_stream(lengths), seq_len=seq_len, packing=packing, document_aware=document_aware, source_id=3
    )


def walk(tokens: list[tuple[int, int]], seq_len: int) -> dict[str, list[int]]:
    """The reference: (token, document) pairs of one window, padded to ``seq_len + 1`` with a document of its own."""
    tokens = tokens + [(PADDING_ID, -1)] * (seq_len + 1 - len(tokens))
    inputs, labels, positions, documents = [], [], [], []
    for place in range(seq_len):
        token, document = tokens[place]
        next_token, next_document = tokens[place + 1]
        is_new = place == 0 or tokens[place - 1][1] != document
        inputs.append(token)
        labels.append(next_token if document == next_document != -1 else IGNORED)
        positions.append(0 if is_new else positions[-1] + 1)
        documents.append(0 if place == 0 else documents[-1] + is_new)
    return {"inputs": inputs, "labels": labels, "positions": positions, "documents": documents}


def as_lists(sequence: TokenSequence) -> dict[str, list[int]]:
    assert sequence.document_ids_T is not None
    return {
        "inputs": sequence.input_ids_T.tolist(),
        "labels": sequence.labels_T.tolist(),
        "positions": sequence.positions_T.tolist(),
        "documents": sequence.document_ids_T.tolist(),
    }


def label_documents(lengths: list[int]) -> list[tuple[int, int]]:
    documents = [document for document, length in enumerate(lengths) for _ in range(length)]
    return [(place + 1, document) for place, document in enumerate(documents)]


@given(lengths=DOCUMENTS, seq_len=SEQ_LENS)
def test_packed_windows_match_the_reference(lengths: list[int], seq_len: int) -> None:
    stream = label_documents(lengths)
    windows = [stream[i : i + seq_len + 1] for i in range(0, len(stream) - seq_len, seq_len)]
    layout = make_layout(lengths, seq_len, packing=True)
    assert [as_lists(layout.read(i)) for i in range(len(layout))] == [walk(window, seq_len) for window in windows]


@given(lengths=DOCUMENTS, seq_len=SEQ_LENS)
def test_padded_sequences_match_the_reference(lengths: list[int], seq_len: int) -> None:
    stream = label_documents(lengths)
    expected = []
    for document, length in enumerate(lengths):
        own = [pair for pair in stream if pair[1] == document]
        expected += [walk(own[i : i + seq_len + 1], seq_len) for i in range(0, length - 1, seq_len)]
    layout = make_layout(lengths, seq_len, packing=False)
    assert [as_lists(layout.read(i)) for i in range(len(layout))] == expected


@given(lengths=DOCUMENTS, seq_len=SEQ_LENS, packing=st.booleans())
def test_without_document_awareness_there_is_one_plain_stream(lengths: list[int], seq_len: int, packing: bool) -> None:
    layout = make_layout(lengths, seq_len, packing=packing, document_aware=False)
    for i in range(len(layout)):
        sequence = layout.read(i)
        assert sequence.document_ids_T is None
        assert sequence.positions_T.tolist() == list(range(seq_len))
        learned = sequence.labels_T != IGNORED
        assert (sequence.labels_T[learned] == sequence.input_ids_T[learned] + 1).all()
        assert learned.all() or not packing


@given(lengths=DOCUMENTS, seq_len=SEQ_LENS)
def test_padded_sequences_predict_every_token_of_a_document_but_its_first(lengths: list[int], seq_len: int) -> None:
    layout = make_layout(lengths, seq_len, packing=False)
    predicted = [label for i in range(len(layout)) for label in layout.read(i).labels_T.tolist() if label != IGNORED]
    firsts = {sum(lengths[:i]) + 1 for i in range(len(lengths))}
    assert predicted == [token for token in range(1, sum(lengths) + 1) if token not in firsts]


@given(lengths=DOCUMENTS, seq_len=SEQ_LENS, packing=st.booleans())
def test_positions_documents_and_labels_break_at_the_same_places(
    lengths: list[int], seq_len: int, packing: bool
) -> None:
    """They come from one source: a document begins where its positions do, and the label before it is ignored."""
    layout = make_layout(lengths, seq_len, packing=packing)
    for i in range(len(layout)):
        sequence = layout.read(i)
        assert sequence.document_ids_T is not None
        begins = np.diff(sequence.document_ids_T, prepend=-1) != 0
        assert (begins == (sequence.positions_T == 0)).all()
        assert (sequence.labels_T[:-1][begins[1:]] == IGNORED).all()


def test_a_known_window() -> None:
    sequence = make_layout([3, 1, 6], 8, packing=True).read(0)
    assert as_lists(sequence) == {
        "inputs": [1, 2, 3, 4, 5, 6, 7, 8],
        "labels": [2, 3, IGNORED, IGNORED, 6, 7, 8, 9],
        "positions": [0, 1, 2, 0, 0, 1, 2, 3],
        "documents": [0, 0, 0, 1, 2, 2, 2, 2],
    }
    assert sequence.source_id == 3
    assert sequence.input_ids_T.dtype == sequence.labels_T.dtype == sequence.positions_T.dtype == np.int64
    assert sequence.document_ids_T is not None
    assert sequence.document_ids_T.dtype == np.int32


def test_documents_of_no_token_leave_no_trace() -> None:
    layout = make_layout([2, 0, 0, 3], 4, packing=True)
    assert as_lists(layout.read(0))["positions"] == [0, 1, 0, 1]
    assert len(make_layout([2, 0, 1, 3], 1, packing=False)) == 3


def test_reading_leaves_the_stream_alone() -> None:
    stream = make_stream([4, 4])
    layout = build_layout(stream, seq_len=4, packing=True, document_aware=True, source_id=0)
    layout.read(0).labels_T[:] = 0
    layout.read(0).input_ids_T[:] = 0
    assert stream.tokens.tolist() == list(range(1, 9))


@pytest.mark.parametrize("document_aware", [True, False])
def test_padding_sequence_has_nothing_to_learn(document_aware: bool) -> None:
    padding = build_padding_sequence(5, document_aware=document_aware)
    assert padding.labels_T.tolist() == [IGNORED] * 5
    assert padding.input_ids_T.tolist() == [PADDING_ID] * 5
    assert padding.positions_T.tolist() == [0, 1, 2, 3, 4]
    assert (padding.document_ids_T is not None) == document_aware
