import json

import pytest

from torchtrain.checkpoint import layout


def make_checkpoint(folder, step):
    path = layout.checkpoint_path(folder, step)
    partial = layout.partial_path(path)
    partial.mkdir(parents=True)
    for name in (layout.METADATA_FILE, layout.STATE_FILE, "__0_0.distcp"):
        (partial / name).write_text(f"{name} of step {step}")
    layout.seal(partial)
    layout.publish(path)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_published_checkpoint_is_whole(tmp_path):
    path = make_checkpoint(tmp_path, 10)
    assert path.name == "step_00000010"
    assert layout.find_damage(path) is None
    assert names(tmp_path) == ["step_00000010"]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda p: (p / "complete.json").unlink(), "complete.json is missing: the save never finished"),
        (lambda p: (p / "complete.json").write_text("{"), "complete.json is unreadable"),
        (lambda p: (p / "complete.json").write_text('{"files": {}}'), "does not list .metadata"),
        (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
        (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda p: (p / "__0_0.distcp").write_text("short"), "__0_0.distcp has 5 bytes instead of"),
    ],
)
def test_damage_is_named(tmp_path, harm, said):
    path = make_checkpoint(tmp_path, 10)
    harm(path)
    assert said in layout.find_damage(path)


def test_the_newest_is_the_last_saved_not_the_highest_step(tmp_path):
    for step in (10, 30, 20):
        make_checkpoint(tmp_path, step)
    assert [path.name for path in layout.list_checkpoints(tmp_path)] == [
        "step_00000020",
        "step_00000030",
        "step_00000010",
    ]


def test_pruning_keeps_the_newest_whole_ones_and_touches_no_damaged_one(tmp_path):
    for step in (1, 2, 3, 4):
        make_checkpoint(tmp_path, step)
    (tmp_path / "step_00000004" / "complete.json").unlink()
    layout.prune(tmp_path, 2)
    assert names(tmp_path) == ["step_00000002", "step_00000003", "step_00000004"]
    layout.prune(tmp_path, 0)
    assert len(names(tmp_path)) == 3


def test_saving_a_step_again_replaces_it(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    make_checkpoint(tmp_path, 5)
    assert names(tmp_path) == ["step_00000005"]
    assert json.loads((path / "complete.json").read_text())["save_index"] == 2


def test_leftovers_go_and_an_interrupted_replacement_is_undone(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    path.rename(tmp_path / "step_00000005.replaced")
    (tmp_path / "step_00000006.partial").mkdir()
    (tmp_path / "notes").mkdir()
    layout.clear_leftovers(tmp_path)
    assert names(tmp_path) == ["notes", "step_00000005"]
    assert layout.find_damage(path) is None


def test_leftovers_of_one_checkpoint_go_and_those_of_its_neighbours_stay(tmp_path):
    path = make_checkpoint(tmp_path, 5)
    path.rename(tmp_path / "step_00000005.replaced")
    for name in ("step_00000005.partial", "step_00000006.partial", "step_00000007.replaced"):
        (tmp_path / name).mkdir()
    layout.clear_leftovers_of(path)
    assert names(tmp_path) == ["step_00000005", "step_00000006.partial", "step_00000007.replaced"]
    assert layout.find_damage(path) is None


def test_a_run_that_starts_anew_neither_resumes_nor_prunes_what_an_earlier_one_left(tmp_path):
    for step in (4, 8):
        make_checkpoint(tmp_path, step)
    assert [path.name for path in layout.begin_run(tmp_path)] == ["step_00000008", "step_00000004"]
    assert layout.list_own_checkpoints(tmp_path) == []
    for step in (2, 3, 4):
        make_checkpoint(tmp_path, step)
    layout.prune(tmp_path, 2)
    assert [path.name for path in layout.list_own_checkpoints(tmp_path)] == ["step_00000004", "step_00000003"]
    assert (tmp_path / "step_00000008").is_dir()


def test_checkpoints_removed_by_hand_do_not_hide_what_is_saved_after_them(tmp_path):
    for step in (4, 8):
        make_checkpoint(tmp_path, step)
    layout.begin_run(tmp_path)
    for old in layout.list_checkpoints(tmp_path):
        old.rename(tmp_path / f"moved_{old.name}")
    path = make_checkpoint(tmp_path, 1)
    assert layout.list_own_checkpoints(tmp_path) == [path]
