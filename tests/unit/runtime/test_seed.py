import random
import subprocess
import sys

import numpy
import torch

from torchtrain.runtime.seed import derive_seed, seed_everything, set_deterministic


def test_derived_seed_is_the_same_forever():
    # Weights and data order follow from these numbers: a change here breaks every resume and every published loss.
    assert derive_seed(0) == 8493733112532773764
    assert derive_seed(0, "layers.0.mlp.up_proj.weight", 3) == 1055255439061847435


def test_derived_seeds_differ_by_every_part():
    seeds = {derive_seed(0), derive_seed(1), derive_seed(0, "a"), derive_seed(0, "a", "b"), derive_seed(0, "ab")}
    seeds |= {derive_seed(0, 1), derive_seed(0, "1")}
    assert len(seeds) == 7
    assert all(0 <= seed < 2**64 for seed in seeds)
    torch.Generator().manual_seed(max(seeds))


def test_derive_seed_needs_no_torch():
    code = "import sys, torchtrain.runtime.seed, torchtrain.runtime.env; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_all_generators_are_seeded():
    def draw():
        seed_everything(7)
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    assert draw() == draw()


def test_deterministic_mode_can_be_switched():
    set_deterministic(True)
    assert torch.are_deterministic_algorithms_enabled()
    set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
