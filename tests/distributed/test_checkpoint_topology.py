"""What is saved on one topology is what is loaded on another, bit for bit."""

import json

import pytest
import torch

from tests.distributed.checkpoint_cases import WORLD_SIZES, Run, load_elsewhere, save_after_training
from torchtrain.checkpoint.safe_reader import read_metadata
from torchtrain.testing.ranks import run_ranks


class CountingSGD(torch.optim.Optimizer):
    """Keeps its step as a plain number, which DCP would pickle."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p -= group["lr"] * p.grad


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [
        ("plain", "plain"),
        ("plain", "fsdp4"),
        ("fsdp4", "plain"),
        ("fsdp4", "hsdp2x2"),
        ("hsdp2x2", "fsdp2"),
        ("fsdp2", "fsdp4"),
    ],
)
def test_every_tensor_arrives_bit_for_bit(tmp_path, saved_on, loaded_on):
    expected = run_ranks(save_after_training, WORLD_SIZES[saved_on], saved_on, tmp_path)[0]
    loaded = run_ranks(load_elsewhere, WORLD_SIZES[loaded_on], loaded_on, tmp_path / "step_00000003", tmp_path)
    for state, tensors in loaded:
        assert state == {"step": 3, "note": "kept"}
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[name]), name


def test_names_are_fqns_and_a_tied_weight_is_saved_once(tmp_path):
    run_ranks(save_after_training, 2, "fsdp2", tmp_path)
    names = set(read_metadata(tmp_path / "step_00000003").state_dict_metadata)
    model = {"embed.weight", "down.weight", "down.bias", "up.weight", "up.bias"}
    expected = {f"model.{fqn}" for fqn in model} | {"model.frozen", "model.offset", "rng.0.cpu", "rng.1.cpu"}
    assert names == expected | {
        f"optimizer.{fqn}.{entry}" for fqn in model for entry in ("step", "exp_avg", "exp_avg_sq")
    }


def train_through(topology, folder, keys):
    run = Run(topology, folder, **keys)
    run.train(2)
    run.save()
    losses = run.train(3)
    run.checkpointer.wait()
    return losses, run.whole_tensors()


def train_resumed(topology, folder):
    run = Run(topology, folder, seed=1, resume="auto")
    assert run.checkpointer.resume(run.model, run.optimizer)["step"] == 2
    return run.train(3), run.whole_tensors()


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("topology", ["plain", "hsdp2x2"])
def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path, topology, async_save):
    """With a background save this also shows that training on does not reach into the copy being written."""
    world_size = WORLD_SIZES[topology]
    through = run_ranks(train_through, world_size, topology, tmp_path, {"async_save": async_save})[0]
    resumed = run_ranks(train_resumed, world_size, topology, tmp_path)[0]
    assert resumed[0] == through[0]
    for name, tensor in resumed[1].items():
        assert torch.equal(tensor, through[1][name]), name


def train_from_the_first_step(topology, folder, saves, resumes, keys):
    run = Run(topology, folder, seed=1 if resumes else 0, resume="auto", **keys)
    if resumes:
        assert run.checkpointer.resume(run.model, run.optimizer)["step"] == 0
    if saves:
        run.save()
    return run.train(3), run.whole_tensors()


@pytest.mark.parametrize("topology", ["plain", "fsdp2"])
@pytest.mark.parametrize("keys", [{}, {"fp32_main_params": True}])
def test_saving_before_the_first_step_changes_nothing_then_or_later(tmp_path, topology, keys):
    runs = [(False, False), (True, False), (False, True)]
    untouched, saved, resumed = (
        run_ranks(train_from_the_first_step, WORLD_SIZES[topology], topology, tmp_path, saves, resumes, keys)[0]
        for saves, resumes in runs
    )
    for losses, tensors in (saved, resumed):
        assert losses == untouched[0]
        for name, tensor in tensors.items():
            assert torch.equal(tensor, untouched[1][name]), name


def resume_counting(folder, target):
    run = Run("plain", folder, seed=1, resume="auto", target=target)
    run.checkpointer.resume(run.model, run.optimizer)
    return [run.optimizer.state[p]["count"] for p in run.optimizer.param_groups[0]["params"]]


def test_optimizer_entries_that_are_numbers_go_through_json(tmp_path):
    target = f"{__name__}.CountingSGD"
    run_ranks(save_after_training, 1, "plain", tmp_path, target=target)
    record = json.loads((tmp_path / "step_00000003" / "state.json").read_text())
    assert record["optimizer_scalars"]["up.bias"] == {"count": 3}
    assert run_ranks(resume_counting, 1, tmp_path, target)[0] == [3] * 3


def generators_after_resume(folder):
    run = Run("fsdp2", folder, seed=1, resume="auto")
    before = torch.get_rng_state()
    run.checkpointer.resume(run.model, run.optimizer)
    return torch.equal(before, torch.get_rng_state())


def test_generators_are_left_alone_when_the_world_size_differs(tmp_path):
    run_ranks(save_after_training, 4, "fsdp4", tmp_path)
    assert run_ranks(generators_after_resume, 2, tmp_path) == [True, True]
