from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtrain.nn.init import BLOCK_NUMEL, Constant, Normal, draw_rows

# Three blocks and a rest: 2^16 / 5000 is 13 rows a block.
SHAPE = (50, 5000)
UNIT_NORMAL = Normal(1.0)


def draw(rule=UNIT_NORMAL, *, seed=1, fqn="layers.0.weight", shape=SHAPE, start=0, stop=None):
    return draw_rows(rule, seed=seed, fqn=fqn, shape=shape, start=start, stop=shape[0] if stop is None else stop)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, SHAPE[0]), max_size=5))
def test_rows_are_the_same_however_they_are_split(cuts):
    bounds = [0, *sorted(cuts), SHAPE[0]]
    parts = [draw(start=low, stop=high) for low, high in pairwise(bounds)]
    assert torch.equal(torch.cat(parts), draw())


@pytest.mark.parametrize("shape", [(3,), (BLOCK_NUMEL + 5,), (4, BLOCK_NUMEL + 1), (7, 3, 2)])
def test_every_rank_of_shapes_draws_its_last_row_alone(shape):
    last = draw(shape=shape, start=shape[0] - 1)
    assert last.dtype == torch.float32
    assert torch.equal(last, draw(shape=shape)[-1:])


@pytest.mark.parametrize("shape", [(6, 4), (6,), (6, 0), (0, 4)])
def test_no_rows_give_an_empty_tensor(shape):
    assert draw(shape=shape, start=0, stop=0).shape == (0, *shape[1:])


def test_rows_outside_the_parameter_are_refused():
    with pytest.raises(ValueError, match=r"rows \[2, 51\)"):
        draw(start=2, stop=51)


def test_seed_fqn_and_block_each_give_other_values():
    values = draw()
    assert not torch.equal(values, draw(seed=2))
    assert not torch.equal(values, draw(fqn="layers.1.weight"))
    assert not torch.equal(values[:13], values[13:26])


def test_seeds_that_share_their_low_32_bits_differ():
    assert not torch.equal(draw(seed=1), draw(seed=1 + 2**32))


def test_values_follow_the_rule():
    values = draw(Normal(0.02))
    assert values.mean().abs() < 1e-3
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert (draw(Constant(1.0), shape=(8,)) == 1).all()


def test_values_are_those_of_the_first_release():
    """Another value means that old seeds no longer give old runs: a breaking change."""
    drawn = draw(seed=0, fqn="embed_tokens.weight", shape=(4, 4), stop=1)[0]
    first_release = [-0.7191731333732605, 0.11527418345212936, 1.7846952676773071, 0.7577124834060669]
    assert drawn.tolist() == first_release
