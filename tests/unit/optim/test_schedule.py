import math

import pytest
import torch

from torchtrain.config.optimization import LRSchedulerConfig
from torchtrain.optim.schedule import lr_at, set_lr


def curve(total_steps, **keys):
    return [lr_at(s, LRSchedulerConfig(**keys), peak_lr=2.0, total_steps=total_steps) for s in range(total_steps)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"name": "constant"}, [2.0, 2.0, 2.0, 2.0]),
        ({"name": "constant", "warmup_steps": 4}, [0.5, 1.0, 1.5, 2.0]),
        ({"name": "linear", "min_lr_ratio": 0.0}, [1.5, 1.0, 0.5, 0.0]),
        ({"name": "linear", "warmup_steps": 2, "min_lr_ratio": 0.5}, [1.0, 2.0, 1.5, 1.0]),
        ({"name": "cosine", "min_lr_ratio": 0.0}, [1 + math.cos(math.pi * k / 4) for k in (1, 2, 3, 4)]),
        ({"name": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.5}, [1.0, 2.0, 1.5, 1.0]),
        ({"name": "wsd", "decay_steps": 2, "min_lr_ratio": 0.0}, [2.0, 2.0, 1.0, 0.0]),
        ({"name": "wsd", "min_lr_ratio": 0.0}, [2.0, 2.0, 2.0, 0.0]),
        ({"name": "wsd", "warmup_steps": 2, "decay_steps": 9, "min_lr_ratio": 0.0}, [1.0, 2.0, 1.0, 0.0]),
        ({"name": "cosine", "warmup_steps": 8}, [0.25, 0.5, 0.75, 1.0]),
    ],
)
def test_closed_form(keys, expected):
    assert curve(4, **keys) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_the_last_step_and_all_after_it_use_the_minimum(name):
    config = LRSchedulerConfig(name=name, warmup_steps=3, min_lr_ratio=0.1)
    for step in (99, 100, 1000):
        assert lr_at(step, config, peak_lr=1.0, total_steps=100) == pytest.approx(0.1)


def test_set_lr_reaches_every_group():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
