"""Kills, failing disks, damaged and foreign checkpoints: nothing older is lost, and every refusal has a name."""

import errno
import logging
import os
import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.distributed.checkpoint_cases import Run, load_elsewhere, save_after_training
from torchtrain.checkpoint import layout
from torchtrain.errors import CheckpointError, SaveError
from torchtrain.testing.ranks import run_ranks


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save_steps(topology, folder, steps, keys):
    run = Run(topology, folder, **keys)
    for _ in range(steps):
        run.train(1)
        run.save()
    run.checkpointer.wait()


def save_and_be_killed_before_the_rename(folder):
    run = Run("plain", folder)
    run.train(1)
    run.save()
    real_fsync, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        real_fsync(descriptor)
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(layout.SEAL_FILE):
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = fsync
    run.train(1)
    run.save()


def test_a_kill_before_the_rename_loses_nothing_older_and_the_next_save_cleans_up(tmp_path):
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(save_and_be_killed_before_the_rename, 1, tmp_path)
    assert names(tmp_path) == ["step_00000001", "step_00000002.partial"]
    assert run_ranks(resume_auto, 1, "plain", tmp_path)[0][0]["step"] == 1
    run_ranks(save_steps, 1, "plain", tmp_path, 1, {})
    assert names(tmp_path) == ["step_00000001"]


def replace_and_be_killed_between_the_renames(folder):
    run = Run("plain", folder)
    run.train(1)
    run.save()
    real_rename = os.rename

    def rename(source, target):
        real_rename(source, target)
        if str(target).endswith(".replaced"):
            os.kill(os.getpid(), signal.SIGKILL)

    os.rename = rename
    again = Run("plain", folder)
    again.train(1)
    again.save()


def test_a_kill_between_the_renames_hides_nothing(tmp_path):
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_ranks(replace_and_be_killed_between_the_renames, 1, tmp_path)
    assert names(tmp_path) == ["step_00000001.partial", "step_00000001.replaced"]
    assert run_ranks(resume_auto, 1, "plain", tmp_path)[0][0]["step"] == 1
    assert "step_00000001" in names(tmp_path)


def resume_and_save_at_once(folder):
    run = Run("plain", folder, resume="auto")
    run.step = run.checkpointer.resume(run.model, run.optimizer)["step"]
    run.save()


def test_what_was_just_resumed_is_not_saved_again(tmp_path):
    run_ranks(save_steps, 1, "plain", tmp_path, 2, {})
    before = (tmp_path / "step_00000002").stat().st_ino
    run_ranks(resume_and_save_at_once, 1, tmp_path)
    assert (tmp_path / "step_00000002").stat().st_ino == before


@pytest.mark.parametrize("async_save", [False, True])
def test_only_the_last_ones_are_kept(tmp_path, async_save):
    run_ranks(save_steps, 2, "fsdp2", tmp_path, 4, {"keep_last": 2, "async_save": async_save})
    assert names(tmp_path) == ["step_00000003", "step_00000004"]


def resume_auto(topology, folder, **keys):
    run = Run(topology, folder, seed=1, resume="auto", **keys)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("torchtrain.checkpoint.checkpointer").addHandler(handler)
    return run.checkpointer.resume(run.model, run.optimizer), messages


def delete_shard(path):
    next(path.glob("__1_*.distcp")).unlink()


def truncate_shard(path):
    os.truncate(next(path.glob("__1_*.distcp")), 100)


def delete_metadata(path):
    (path / ".metadata").unlink()


def delete_seal(path):
    (path / "complete.json").unlink()


def empty_state(path):
    size = (path / "state.json").stat().st_size
    (path / "state.json").write_text("{}".ljust(size))


def garble_metadata(path):
    content = bytearray((path / ".metadata").read_bytes())
    content[40:60] = bytes(20)
    (path / ".metadata").write_bytes(content)


@pytest.mark.parametrize("harm", [delete_shard, truncate_shard, delete_metadata, delete_seal, garble_metadata])
def test_a_torn_checkpoint_is_passed_over_by_auto_and_refused_by_path(tmp_path, harm):
    run_ranks(save_steps, 2, "fsdp2", tmp_path, 2, {})
    harm(tmp_path / "step_00000002")
    (state, messages), (other_state, _) = run_ranks(resume_auto, 2, "fsdp2", tmp_path)
    assert state["step"] == other_state["step"] == 1
    assert [("skipped" in message, "step_00000002" in message) for message in messages] == [(True, True)]
    with pytest.raises(AssertionError, match="CheckpointError") as caught:
        run_ranks(load_elsewhere, 2, "fsdp2", tmp_path / "step_00000002", tmp_path)
    assert f"the newest whole one is {tmp_path / 'step_00000001'}" in str(caught.value)


def overwrite_data(path):
    file = next(path.glob("__0_*.distcp"))
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize("harm", [overwrite_data, empty_state])
def test_content_that_turns_out_unreadable_is_passed_over_too(tmp_path, harm):
    run_ranks(save_steps, 2, "fsdp2", tmp_path, 2, {})
    harm(tmp_path / "step_00000002")
    for state, messages in run_ranks(resume_auto, 2, "fsdp2", tmp_path):
        assert state["step"] == 1
        assert any("step_00000002" in message and "cannot be read" in message for message in messages)


def test_a_checkpoint_of_another_model_is_refused_with_the_names(tmp_path):
    run_ranks(save_after_training, 1, "plain", tmp_path)
    with pytest.raises(AssertionError, match="CheckpointError") as caught:
        run_ranks(load_elsewhere, 2, "fsdp2", tmp_path / "step_00000003", tmp_path, width=7)
    assert "model.down.weight: float32[5, 6] there, float32[7, 6] here" in str(caught.value)
    with pytest.raises(AssertionError, match="is of another model or optimizer"):
        run_ranks(resume_auto, 1, "plain", tmp_path, width=7)


def test_a_checkpoint_of_another_optimizer_is_refused_with_the_names(tmp_path):
    run_ranks(save_after_training, 1, "plain", tmp_path)
    with pytest.raises(AssertionError, match=r"it has besides optimizer\.down\.bias\.exp_avg"):
        run_ranks(load_elsewhere, 1, "plain", tmp_path / "step_00000003", tmp_path, target="torch.optim.SGD")


def refusal_leaves_weights_alone(path, folder):
    run = Run("plain", folder, width=7)
    before = run.whole_tensors()
    with pytest.raises(CheckpointError):
        run.checkpointer.load(path, run.model, run.optimizer)
    return all(torch.equal(before[name], tensor) for name, tensor in run.whole_tensors().items())


def test_a_refused_checkpoint_has_changed_nothing(tmp_path):
    run_ranks(save_after_training, 1, "plain", tmp_path)
    assert run_ranks(refusal_leaves_weights_alone, 1, tmp_path / "step_00000003", tmp_path) == [True]


def start_anew(folder, resume):
    run = Run("plain", folder, resume=resume)
    return run.checkpointer.resume(run.model, run.optimizer)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_without_a_checkpoint_a_run_starts_anew(tmp_path, resume):
    assert run_ranks(start_anew, 1, tmp_path / "none", resume) == [None]


def test_a_run_that_starts_anew_is_told_of_an_earlier_one_and_kept_apart_from_it(tmp_path):
    run_ranks(save_steps, 1, "plain", tmp_path, 2, {})
    run_ranks(start_anew, 1, tmp_path, None)
    state, messages = run_ranks(resume_auto, 1, "plain", tmp_path)[0]
    assert state is None
    assert "2 checkpoint(s) of an earlier run, the newest step_00000002" in messages[0]
    run_ranks(save_steps, 1, "plain", tmp_path, 1, {})
    assert run_ranks(resume_auto, 1, "plain", tmp_path)[0][0]["step"] == 1
    assert "step_00000002" in names(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="there is no such folder"):
        run_ranks(start_anew, 1, tmp_path, str(tmp_path / "step_00000009"))


def save_and_wait(run):
    run.save()
    run.checkpointer.wait()


def fail_second_save(folder, async_save):
    """The disk of rank 1 fills up during the second save; the third finds room again."""
    run = Run("fsdp2", folder, async_save=async_save)
    run.train(1)
    run.save()
    run.checkpointer.wait()
    real_fsync = os.fsync

    def full_disk(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() == 1:
        os.fsync = full_disk
    run.train(1)
    with pytest.raises(SaveError, match=r"rank 1: OSError: .*No space left"):
        save_and_wait(run)
    dist.barrier()
    os.fsync = real_fsync
    kept = names(folder)
    dist.barrier()
    save_and_wait(run)
    return kept


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_is_heard_on_every_rank_and_replaces_nothing(tmp_path, async_save):
    for kept in run_ranks(fail_second_save, 2, tmp_path, async_save):
        assert kept == ["step_00000001", "step_00000002.partial"]
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    assert layout.find_damage(tmp_path / "step_00000002") is None


def save_below_a_file(folder):
    run = Run("fsdp2", folder)
    with pytest.raises(SaveError, match=r"NotADirectoryError|FileExistsError"):
        run.save()


def test_a_folder_that_cannot_be_made_is_a_save_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    run_ranks(save_below_a_file, 2, tmp_path / "file" / "checkpoints")


class KeepsObjects(torch.optim.Optimizer):
    """Keeps what no JSON can hold."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["thing"] = object()


def save_objects(folder):
    run = Run("plain", folder, target=f"{__name__}.KeepsObjects")
    run.train(1)
    with pytest.raises(CheckpointError, match=r"optimizer state thing of embed\.weight is of type object"):
        run.save()


def test_optimizer_state_that_would_need_a_pickle_is_refused(tmp_path):
    run_ranks(save_objects, 1, tmp_path)


def train_behind_a_slow_disk(folder):
    run = Run("plain", folder, async_save=True)
    run.train(1)
    expected = run.whole_tensors()
    run.save()
    # Overwritten while the worker still has everything to write.
    for tensor in (*run.model.parameters(), *(t for s in run.optimizer.state.values() for t in s.values())):
        nn.init.constant_(tensor, 7.0)
    run.checkpointer.wait()
    run.checkpointer.load(folder / "step_00000001", run.model, run.optimizer)
    return all(torch.equal(expected[name], tensor) for name, tensor in run.whole_tensors().items())


def test_a_background_save_holds_the_moment_it_was_called(tmp_path):
    assert run_ranks(train_behind_a_slow_disk, 1, tmp_path) == [True]


def test_moving_a_checkpoint_elsewhere_keeps_it_whole(tmp_path):
    expected = run_ranks(save_after_training, 1, "plain", tmp_path / "here")[0]
    shutil.move(tmp_path / "here" / "step_00000003", tmp_path / "best")
    _, tensors = run_ranks(load_elsewhere, 1, "plain", tmp_path / "best", tmp_path / "new")[0]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
