import pytest

from torchtrain.metrics.throughput import model_flops_utilization


def test_mfu_is_achieved_over_peak():
    mfu = model_flops_utilization(tokens_per_second=1e4, flops_per_token=6e10, peak_flops=1e15, num_devices=2)
    assert mfu == pytest.approx(0.3)


def test_mfu_is_unknown_where_the_peak_is():
    assert model_flops_utilization(tokens_per_second=1, flops_per_token=1, peak_flops=None, num_devices=1) is None
