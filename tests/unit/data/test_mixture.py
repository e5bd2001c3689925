from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrain.data.mixture import Interleaving, Slot, build_mixture, interleave


def sources_of(mixture: Interleaving, start: int, stop: int) -> list[int]:
    return [mixture.locate(i).source for i in range(start, stop)]


@pytest.mark.parametrize(
    ("weights", "counts"),
    [
        ([1.0], (1,)),
        ([1.0, 1.0, 1.0], (1, 1, 1)),
        ([0.7, 0.3], (7, 3)),
        ([0.1, 0.2], (1, 2)),
        ([3.0, 1.5], (2, 1)),
        ([0.125, 0.5, 0.375], (1, 4, 3)),
    ],
)
def test_weights_are_met_exactly_in_the_shortest_period(weights: list[float], counts: tuple[int, ...]) -> None:
    mixture = build_mixture(weights)
    assert mixture.counts == counts
    period = sum(counts)
    for start in (0, 1, 5 * period + 2):
        drawn = Counter(sources_of(mixture, start, start + period))
        assert tuple(drawn[source] for source in range(len(counts))) == counts


def test_weights_without_a_short_period_are_rounded_and_none_is_lost() -> None:
    mixture = build_mixture([1.0, 1e-9, 0.123456789])
    assert sum(mixture.counts) <= 10_002
    assert mixture.counts[1] == 1
    assert mixture.counts[2] / sum(mixture.counts) == pytest.approx(0.123456789 / 1.123456789, abs=2e-4)


def test_places_of_a_source_are_spread_evenly() -> None:
    assert sources_of(build_mixture([0.75, 0.25]), 0, 8) == [0, 0, 1, 0, 0, 0, 1, 0]


@given(st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=5))
def test_any_prefix_has_the_shares_to_within_one_sequence_per_source(counts: list[int]) -> None:
    mixture = interleave(counts)
    drawn = Counter()
    for i in range(2 * sum(counts)):
        drawn[mixture.locate(i).source] += 1
        for source, count in enumerate(counts):
            assert abs(drawn[source] - (i + 1) * count / sum(counts)) <= len(counts)


@given(st.lists(st.integers(min_value=0, max_value=6), min_size=1, max_size=4).filter(any))
def test_each_source_is_drawn_from_in_order_without_gaps(counts: list[int]) -> None:
    mixture = interleave(counts)
    slots = [mixture.locate(i) for i in range(3 * sum(counts))]
    for source, count in enumerate(counts):
        assert [slot.index for slot in slots if slot.source == source] == list(range(3 * count))


def test_a_place_needs_no_history() -> None:
    assert build_mixture([0.7, 0.3]).locate(10**15 + 2) == Slot(source=0, index=7 * 10**14 + 1)
