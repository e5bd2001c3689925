import json

import pytest

from torchtrain.errors import NonFiniteError
from torchtrain.optim.loss_scaler import LossScaler


def test_overflow_halves_and_a_streak_doubles():
    scaler = LossScaler(initial_scale=8.0, growth_interval=3)
    scales = []
    for is_finite in (True, True, False, True, True, True, True):
        scaler.update(is_finite)
        scales.append(scaler.scale)
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_state_survives_json_in_the_middle_of_a_streak():
    scaler = LossScaler(initial_scale=8.0, growth_interval=3)
    scaler.update(True)
    scaler.update(True)
    resumed = LossScaler(growth_interval=3)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    resumed.update(True)
    assert resumed.scale == 16.0


def test_overflow_without_a_scale_stops_the_run():
    scaler = LossScaler(initial_scale=2.0)
    scaler.update(False)
    with pytest.raises(NonFiniteError):
        scaler.update(False)
