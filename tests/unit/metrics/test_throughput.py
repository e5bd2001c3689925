import pytest

from torchtrain.metrics.throughput import mfu


def test_mfu_is_achieved_over_peak():
    assert mfu(1e4, flops_per_token=6e10, peak_flops=1e15, num_devices=2) == pytest.approx(0.3)


def test_mfu_is_unknown_where_the_peak_is():
    assert mfu(1, flops_per_token=1, peak_flops=None, num_devices=1) is None
