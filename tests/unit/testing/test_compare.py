import math

import pytest
import torch

from torchtrain.testing.compare import relative_error


def test_error_is_relative_to_the_expected_norm():
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(2.0, 1.0) == 1.0


def test_zero_reference_gives_the_absolute_distance():
    assert relative_error(torch.full((4,), 0.5), torch.zeros(4)) == 1.0
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0.0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_non_finite_values_pass_no_tolerance(poison):
    assert relative_error(torch.tensor([1.0, poison]), torch.ones(2)) == math.inf
    assert relative_error(torch.ones(2), torch.tensor([1.0, poison])) == math.inf


def test_different_shapes_are_refused():
    with pytest.raises(ValueError, match="shapes differ"):
        relative_error(torch.ones(2), torch.ones(2, 1))
