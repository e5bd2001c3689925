"""Ranks that take turns."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from torchtrain.distributed.process_group import in_turns
from torchtrain.errors import DataError
from torchtrain.testing.ranks import run_ranks


def note_the_order(folder: Path, turns: list[int]) -> list[str]:
    turn = turns[dist.get_rank()]
    with in_turns(turn, num_turns=3):
        before = sorted(path.name for path in folder.iterdir())
        time.sleep(0.05)
        (folder / str(turn)).touch()
    return before


def fail_everywhere() -> str:
    try:
        with in_turns(dist.get_rank(), num_turns=3):
            raise DataError("the source is empty")
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("turns", [[0, 1, 2], [0, 2, 1], [0, 2, 2]])
def test_each_turn_begins_when_the_one_before_has_ended(tmp_path: Path, turns: list[int]) -> None:
    seen = run_ranks(note_the_order, 3, tmp_path, turns)
    for turn, before in zip(turns, seen, strict=True):
        assert {int(name) for name in before} >= {earlier for earlier in turns if earlier < turn}
        assert all(int(name) <= turn for name in before)


def test_a_rank_that_fails_lets_the_others_meet_the_same_error() -> None:
    assert run_ranks(fail_everywhere, 3) == ["the source is empty"] * 3
