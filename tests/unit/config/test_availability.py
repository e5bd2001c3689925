from __future__ import annotations

import pytest

from torchtrain.config.availability import NOT_YET, find_unavailable
from torchtrain.config.load import read_job

ASKS = [
    "task.name=sft",
]


@pytest.mark.parametrize("override", ASKS)
def test_feature_of_a_later_version_stops_with_one_error_that_names_the_key(override):
    reading = read_job(None, [override])
    assert reading.faults == ()
    (fault,) = find_unavailable(reading.job)
    assert fault.path == override.partition("=")[0]
    assert fault.rule.startswith("not available yet")
    assert fault.fix.endswith("for now")


def test_defaults_are_available():
    assert find_unavailable(read_job(None).job) == []


def test_every_row_is_tried_here():
    assert {row.path for row in NOT_YET} == {override.partition("=")[0] for override in ASKS}
