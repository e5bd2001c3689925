"""Files that many fill: what the library reads is what was written, box by box."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from torchtrain.checkpoint.hf_export import Share, choose_writers
from torchtrain.checkpoint.hf_files import BoxWriter, create_files, plan_files
from torchtrain.checkpoint.hf_folder import open_folder

BOXES = [
    ((slice(0, 5), slice(0, 4), slice(0, 3)),),
    ((slice(0, 2), slice(0, 4), slice(0, 3)), (slice(2, 5), slice(0, 4), slice(0, 3))),
    ((slice(0, 5), slice(0, 1), slice(0, 3)), (slice(0, 5), slice(1, 4), slice(0, 3))),
    (
        (slice(0, 5), slice(0, 2), slice(0, 1)),
        (slice(0, 5), slice(2, 4), slice(0, 1)),
        (slice(0, 2), slice(0, 4), slice(1, 3)),
        (slice(2, 5), slice(0, 4), slice(1, 3)),
    ),
]


@pytest.mark.parametrize("boxes", BOXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_boxes_of_several_writers_add_up_to_the_tensor(tmp_path, boxes, dtype):
    tensors = {"cube": torch.randn(5, 4, 3).to(dtype), "other": torch.randn(3).to(dtype)}
    plan = plan_files({name: (tuple(t.shape), dtype) for name, t in tensors.items()}, max_bytes=None)
    create_files(tmp_path / "out", plan)
    for box in boxes:
        writer = BoxWriter(tmp_path / "out", plan)
        writer.write("cube", box, tensors["cube"][box])
        writer.close()
    writer = BoxWriter(tmp_path / "out", plan)
    writer.write("other", (slice(0, 3),), tensors["other"])
    writer.close()
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_files_are_filled_in_the_order_of_layers_up_to_their_limit(tmp_path):
    tensors = {f"layers.{index}": ((10,), torch.float32) for index in (10, 9, 0)}
    plan = plan_files(tensors, max_bytes=80)
    assert list(plan.places) == ["layers.0", "layers.9", "layers.10"]
    assert [place.file for place in plan.places.values()] == [
        "model-00001-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    create_files(tmp_path / "out", plan)
    (tmp_path / "out" / "config.json").write_text("{}")
    assert open_folder(tmp_path / "out").tensors.keys() == tensors.keys()
    assert len(plan_files(tensors, max_bytes=1).sizes) == 3


def test_each_value_is_written_by_one_of_those_that_hold_it():
    def share(*rows: int) -> Share:
        return Share((4, 2), (slice(*rows), slice(0, 2)), torch.float32)

    halves = [share(0, 2), share(0, 2), share(2, 4), share(2, 4)]
    shares = [{f"p{index}": half for index in range(20)} | {"norm": share(0, 4)} for half in halves]
    shares[3]["empty"] = share(4, 4)
    chosen = choose_writers(shares)
    for index in range(20):
        writers = [rank for rank, fqns in enumerate(chosen) if f"p{index}" in fqns]
        assert len(writers) == 2
        assert {halves[rank].box[0].start for rank in writers} == {0, 2}
    assert sum("norm" in fqns for fqns in chosen) == 1
    assert not any("empty" in fqns for fqns in chosen)
    assert all(len(fqns) > 3 for fqns in chosen)
