"""What an export puts in a folder's place, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from torchtrain.checkpoint.hf_export import LiveWeights, export_weights, find_target_faults
from torchtrain.checkpoint.hf_side_files import SideFiles
from torchtrain.errors import SaveError
from torchtrain.hugging_face.weight_map import Renamed, WeightMap

MAP = WeightMap(rows=(Renamed("w", "disk.w"),))


def export(folder: Path, value: float = 1.0, dtype: torch.dtype | None = None, **copies: Path) -> None:
    weights = LiveWeights({"w": torch.full((3, 2), value)})
    export_weights(weights, folder, MAP, SideFiles({}, copies), dtype=dtype)


def stored_value(folder: Path) -> float:
    return load_file(folder / "model.safetensors")["disk.w"][0, 0].item()


def test_an_export_takes_the_place_of_another_and_of_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    export(folder)
    folder.rename(tmp_path / "hf.replaced")
    export(tmp_path / "hf.partial")
    export(folder, 2.0)
    assert stored_value(folder) == 2.0
    assert [place.name for place in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("place", ["hf", "hf.partial", "hf.replaced"])
def test_a_folder_that_holds_anything_else_is_left_as_it_is(tmp_path: Path, place: str) -> None:
    (tmp_path / place / "thesis").mkdir(parents=True)
    with pytest.raises(SaveError, match="must be new or hold an earlier export, which is replaced: there is thesis"):
        export(tmp_path / "hf")
    assert (tmp_path / place / "thesis").is_dir()
    assert [found.name for found in tmp_path.iterdir()] == [place]


def test_a_folder_by_the_name_of_a_file_is_not_an_export_s(tmp_path: Path) -> None:
    (tmp_path / "hf" / "config.json").mkdir(parents=True)
    (tmp_path / "hf.partial").symlink_to(tmp_path / "nowhere")
    faults = find_target_faults(tmp_path / "hf", "target")
    assert [fault.rule.rpartition("there is ")[2] for fault in faults] == ["config.json", "hf.partial"]


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("mine")
    (fault,) = find_target_faults(tmp_path / "hf", "target")
    assert "there is hf" in fault.rule


def test_an_export_through_a_link_replaces_what_it_points_to(tmp_path: Path) -> None:
    export(tmp_path / "disk")
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    export(tmp_path / "link", 2.0)
    assert (tmp_path / "link").is_symlink()
    assert stored_value(tmp_path / "disk") == 2.0


def test_values_beyond_float16_are_refused_and_leave_the_earlier_export(tmp_path: Path) -> None:
    export(tmp_path / "hf")
    with pytest.raises(SaveError, match=r"disk\.w has values that float16 cannot hold"):
        export(tmp_path / "hf", 7e4, torch.float16)
    assert stored_value(tmp_path / "hf") == 1.0
    export(tmp_path / "hf", 6e4, torch.float16)
    assert stored_value(tmp_path / "hf") == 6e4
