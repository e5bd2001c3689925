"""A checkpoint is data: whatever it names, nothing of it runs."""

import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta

from torchtrain.checkpoint.safe_reader import SafeFileSystemReader, read_metadata
from torchtrain.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Payload:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "step_00000001"
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.tensor(3)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


def rewrite_metadata(folder, change):
    metadata = read_metadata(folder)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_what_dcp_writes_is_read(folder):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.tensor(0)}
    dcp.load(tensors, storage_reader=SafeFileSystemReader(folder), no_dist=True)
    assert torch.equal(tensors["a"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tensors["b"], torch.ones(4, dtype=torch.bfloat16))
    assert tensors["c"] == 3


def test_a_path_that_another_python_pickled_is_read(folder):
    metadata = read_metadata(folder)
    metadata.storage_meta = StorageMeta(checkpoint_id=folder)
    text = pickle.dumps(metadata, protocol=2)
    own = type(folder).__module__.encode()
    for module in (b"pathlib", b"pathlib._local"):
        (folder / ".metadata").write_bytes(text.replace(b"c" + own + b"\nPosixPath", b"c" + module + b"\nPosixPath"))
        assert module + b"\nPosixPath" in (folder / ".metadata").read_bytes()
        assert read_metadata(folder).storage_meta.checkpoint_id == folder


def test_a_malicious_metadata_pickle_is_refused_and_does_not_run(folder, tmp_path):
    trace = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(f"touch {trace}")))
    with pytest.raises(CheckpointError, match=r"refused to load posix\.system"):
        read_metadata(folder)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["load", "hub", "serialization.os.system"])
def test_of_torch_only_dtypes_are_named(folder, name):
    (folder / ".metadata").write_bytes(b"\x80\x04\x8c\x05torch\x8c" + bytes([len(name)]) + name.encode() + b"\x93.")
    with pytest.raises(CheckpointError, match=r"refused to load torch\."):
        read_metadata(folder)


def test_a_payload_hidden_in_real_metadata_is_refused(folder, tmp_path):
    trace = tmp_path / "ran"
    metadata = read_metadata(folder)
    metadata.planner_data = Payload(f"touch {trace}")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="refused"):
        read_metadata(folder)
    assert not trace.exists()


def test_entries_that_dcp_would_unpickle_are_refused(folder):
    metadata = Metadata({"a": BytesStorageMetadata()}, storage_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        read_metadata(folder)


def point_outside(metadata):
    next(iter(metadata.storage_data.values())).relative_path = "../secret"


def point_past_the_end(metadata):
    next(iter(metadata.storage_data.values())).length = 10**9


def drop_chunk(metadata):
    metadata.state_dict_metadata["a"].chunks.clear()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (point_outside, "which is not a file of this checkpoint"),
        (point_past_the_end, "past the end"),
        (drop_chunk, "the chunks of a do not add up"),
    ],
)
def test_metadata_that_its_files_cannot_bear_out_is_refused(folder, change, said):
    (folder.parent / "secret").write_bytes(bytes(10_000))
    rewrite_metadata(folder, change)
    with pytest.raises(CheckpointError, match=said):
        read_metadata(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps([1, 2]), pickle.dumps({"a": 1})])
def test_what_is_no_metadata_is_refused(folder, content):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match="metadata"):
        read_metadata(folder)
