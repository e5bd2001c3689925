from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from torchtrain.config.data import SourceConfig
from torchtrain.data.dataset import SequenceDataset
from torchtrain.data.packing import TokenSequence
from torchtrain.errors import DataError

MakeDataset = Callable[..., SequenceDataset]
WriteJsonl = Callable[..., SourceConfig]


def number_words(count: int, start: int = 0) -> list[str]:
    """Texts of four different characters each."""
    return [f"{i:04d}" for i in range(start, start + count)]


def key(sequence: TokenSequence) -> tuple[int, bytes]:
    return sequence.source_id, sequence.input_ids_T.tobytes()


def test_an_epoch_reads_every_sequence_once(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    dataset = make_dataset(write_jsonl("a", number_words(40)))
    count = dataset.num_train_sequences
    assert count == (40 * 6 - 1) // 8
    in_order = make_dataset(write_jsonl("a", number_words(40)), shuffle=False)
    expected = Counter(key(in_order.train_sequence(i)) for i in range(count))
    assert max(expected.values()) == 1
    for epoch in range(3):
        assert Counter(key(dataset.train_sequence(epoch * count + i)) for i in range(count)) == expected


def test_epochs_differ_and_depend_on_the_seed_alone(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    source = write_jsonl("a", number_words(40))
    dataset = make_dataset(source)
    count = dataset.num_train_sequences
    epochs = [[key(dataset.train_sequence(e * count + i)) for i in range(count)] for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    again, other_seed = make_dataset(source), make_dataset(source, seed=1)
    # Backwards, so that nothing can depend on what was read before.
    assert [key(again.train_sequence(i)) for i in reversed(range(count))] == epochs[0][::-1]
    assert [key(other_seed.train_sequence(i)) for i in range(count)] != epochs[0]


def test_shuffle_off_keeps_the_order_of_the_file(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    dataset = make_dataset(write_jsonl("a", ["abcdefghijklmnopqrstuvw"]), shuffle=False)
    texts = [bytes(t for t in dataset.train_sequence(i).input_ids_T if t < 256) for i in range(4)]
    assert texts == [b"abcdefg", b"hijklmno", b"pqrstuvw", b"abcdefg"]


def test_sources_are_mixed_by_weight_and_each_keeps_its_own_epochs(
    make_dataset: MakeDataset, write_jsonl: WriteJsonl
) -> None:
    small, large = write_jsonl("small", number_words(8), weight=3.0), write_jsonl("large", number_words(80), name="big")
    dataset = make_dataset(small, large)
    assert dataset.source_names == ("small", "big")
    drawn = [dataset.train_sequence(i) for i in range(40)]
    assert Counter(sequence.source_id for sequence in drawn) == {0: 30, 1: 10}
    alone = make_dataset(small)
    assert [key(s) for s in drawn if s.source_id == 0] == [key(alone.train_sequence(i)) for i in range(30)]


def test_held_out_sequences_are_never_trained_on(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    sources = write_jsonl("a", number_words(60)), write_jsonl("b", number_words(30, start=500))
    dataset = make_dataset(*sources, holdout_fraction=0.25)
    held_out = [key(dataset.eval_sequence(i)) for i in range(dataset.num_eval_sequences)]
    assert len(set(held_out)) == len(held_out) == round(44 * 0.25) + round(22 * 0.25)
    trained = {key(dataset.train_sequence(i)) for i in range(4 * dataset.num_train_sequences)}
    assert trained.isdisjoint(held_out)
    assert len(trained) == dataset.num_train_sequences
    with pytest.raises(IndexError):
        dataset.eval_sequence(dataset.num_eval_sequences)


def test_held_out_is_the_end_of_each_source_and_does_not_depend_on_the_seed(
    make_dataset: MakeDataset, write_jsonl: WriteJsonl
) -> None:
    source = write_jsonl("a", number_words(40))
    in_order = make_dataset(source, shuffle=False)
    last = [key(in_order.train_sequence(i)) for i in range(26, 29)]
    for seed in (0, 1):
        dataset = make_dataset(source, seed=seed, holdout_fraction=0.1)
        assert [key(dataset.eval_sequence(i)) for i in range(3)] == last


def test_a_short_evaluation_sees_every_source(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    sources = [write_jsonl(name, number_words(60)) for name in "abc"]
    dataset = make_dataset(*sources, holdout_fraction=0.5)
    assert {dataset.eval_sequence(i).source_id for i in range(3)} == {0, 1, 2}


def test_one_sequence_stays_to_train_on(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    dataset = make_dataset(write_jsonl("a", number_words(3)), holdout_fraction=0.99)
    assert (dataset.num_train_sequences, dataset.num_eval_sequences) == (1, 1)


def test_unpacked_documents_are_padded(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    dataset = make_dataset(write_jsonl("a", ["ab", "cdefghijk"]), packing=False, shuffle=False)
    labels = [dataset.train_sequence(i).labels_T.tolist() for i in range(dataset.num_train_sequences)]
    assert labels == [
        [*b"ab", 257, *[-100] * 5],
        [*b"cdefghij"],
        [*b"k", 257, *[-100] * 6],
    ]


def test_token_ids_fit_int64_and_keep_their_value(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    sequence = make_dataset(write_jsonl("a", ["abcdefghijk"])).train_sequence(0)
    assert sequence.input_ids_T.dtype == np.int64
    assert sequence.input_ids_T.tolist() == [256, *b"abcdefg"]


def test_source_shorter_than_a_sequence_is_refused(make_dataset: MakeDataset, write_jsonl: WriteJsonl) -> None:
    source = write_jsonl("a", ["abcdef"])  # eight tokens with BOS and EOS: one too few
    with pytest.raises(DataError, match=r"a\.jsonl: its 8 tokens .* training\.seq_len, or set dataset\.packing"):
        make_dataset(source)
    assert make_dataset(source, packing=False).num_train_sequences == 1
    with pytest.raises(DataError, match="at least 2 sequences"):
        make_dataset(source, packing=False, holdout_fraction=0.5)


def test_token_ids_beyond_the_model_are_refused_with_both_sizes(
    make_dataset: MakeDataset, write_jsonl: WriteJsonl
) -> None:
    message = r"tokenizer bytes gives token ids up to 257 .* model's vocabulary is 257; set .* to at least 258"
    with pytest.raises(DataError, match=message):
        make_dataset(write_jsonl("a", number_words(9)), vocab_size=257)
