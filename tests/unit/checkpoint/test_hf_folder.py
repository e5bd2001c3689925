"""Hugging Face folders that are whole, and every way in which they are not: each is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from torchtrain.checkpoint.hf_folder import INDEX_FILE, SINGLE_FILE, SliceReader, open_folder
from torchtrain.errors import WeightsError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    """Two files and an index."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / FIRST)
    save_file({"b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(1)}, tmp_path / SECOND)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND, "c": SECOND}}))
    return tmp_path


def refusal(path):
    with pytest.raises(WeightsError) as caught:
        open_folder(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_headers_are_read_and_slices_are_counted(folder):
    opened = open_folder(folder)
    assert {name: (stored.dtype, stored.shape) for name, stored in opened.tensors.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (4,)),
        "c": ("F32", (1,)),
    }
    with SliceReader(opened) as reader:
        assert reader.num_bytes == 0
        assert reader.read("a", (slice(0, 2), slice(1, 2))).tolist() == [[1.0], [4.0]]
        assert reader.read("b", (slice(1, 4),)).dtype == torch.bfloat16
        assert reader.num_bytes == 2 * 4 + 3 * 2


def test_one_file_needs_no_index(folder):
    (folder / INDEX_FILE).unlink()
    (folder / SECOND).unlink()
    assert open_folder(folder).tensors.keys() == open_folder(folder / FIRST).tensors.keys() == {"a"}


def test_several_files_without_an_index_are_refused(folder):
    (folder / INDEX_FILE).unlink()
    assert f"{INDEX_FILE} = null: must be there: without it nobody knows whether 2" in refusal(folder)


def test_a_single_file_beside_an_index_of_others_is_refused_as_hugging_face_would_read_it_instead(folder):
    save_file({"a": torch.zeros(2, 3)}, folder / SINGLE_FILE)
    assert f"{SINGLE_FILE} = null: must not lie beside {INDEX_FILE}" in refusal(folder)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": SINGLE_FILE}}))
    assert open_folder(folder).tensors.keys() == {"a"}


def test_a_missing_shard_is_named(folder):
    (folder / SECOND).unlink()
    assert f"{SECOND} = null: must be there: {INDEX_FILE} says it holds 2 tensors; fetch it" in refusal(folder)


def test_a_truncated_file_is_named(folder):
    content = (folder / SECOND).read_bytes()
    for size in (len(content) - 1, 20, 4, 0):
        (folder / SECOND).write_bytes(content[:size])
        assert f"{SECOND} = '{size} bytes': must be a whole safetensors file: it is cut short or none" in refusal(
            folder
        )


def test_all_files_that_are_damaged_are_named_at_once(folder):
    (folder / FIRST).write_bytes(b"")
    (folder / SECOND).unlink()
    said = refusal(folder)
    assert "(2 faults)" in said
    assert FIRST in said
    assert SECOND in said


@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        ({"a": FIRST, "b": SECOND}, f"{SECOND}: c = null: must be listed in {INDEX_FILE}"),
        ({"a": FIRST, "b": SECOND, "c": SECOND, "d": FIRST}, f"{FIRST} = '1 tensors': must hold d"),
        ({"a": "../elsewhere.safetensors"}, "'../elsewhere.safetensors': must lie beside the index"),
        ("none", "weight_map = 'a str': must map tensors to files"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(folder, listed, complaint):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": listed}))
    assert complaint in refusal(folder)


def test_a_folder_without_config_or_weights_is_refused(folder, tmp_path):
    assert "there is no such file or folder" in refusal(tmp_path / "nowhere")
    (folder / "config.json").write_text("{")
    assert "config.json = null: must be JSON, and cannot be read" in refusal(folder)
    (folder / "config.json").write_text("[]")
    assert "config.json = 'a list': must hold an object" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json = null: must be there, beside the weights" in refusal(folder)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert f"must hold {INDEX_FILE} or a safetensors file: there is neither" in refusal(tmp_path / "empty")
