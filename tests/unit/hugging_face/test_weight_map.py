"""Rows of weight maps: every parameter is covered once, and boxes meet where they should."""

from __future__ import annotations

import math

import pytest
import torch

from models.registry import FAMILIES, load_spec, resolve_architecture
from torchtrain.hugging_face.weight_map import Fused, Renamed, Stacked, WeightMap, intersect, whole_box

FUSED_AND_APART = WeightMap(
    rows=(
        *(Renamed(f"layers.{{layer}}.{name}", f"model.layers.{{layer}}.{name}") for name in "qkv"),
        Fused(tuple(f"layers.{{layer}}.{name}" for name in "qkv"), "model.layers.{layer}.qkv", dim=0),
    ),
    ignored=("model.layers.{layer}.inv_freq",),
)
SHAPES = {"layers.3.q": (8, 5), "layers.3.k": (4, 5), "layers.3.v": (4, 5)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_a_family_has_a_name_on_disk_of_its_own(family):
    preset = resolve_architecture(family, "debug", {})
    with torch.device("meta"):
        model = load_spec(family).build(preset)
    shapes = {fqn: tuple(parameter.shape) for fqn, parameter in model.named_parameters()}
    weights = load_spec(family).hugging_face.weights
    pieces = [piece for fqn in shapes for piece in next(weights.layouts(fqn, shapes))]
    boxes = [(piece.disk_name, *((part.start, part.stop) for part in piece.disk)) for piece in pieces]
    assert len(boxes) == len(set(boxes)) >= len(shapes)
    sizes = {piece.disk_name: math.prod(piece.disk_shape) for piece in pieces}
    assert sum(sizes.values()) == sum(math.prod(shape) for shape in shapes.values())


def test_what_is_on_disk_decides_between_fused_and_separate():
    apart = {f"model.layers.3.{name}" for name in "qkv"}
    (piece,) = FUSED_AND_APART.find_stored("layers.3.k", SHAPES, apart)
    assert (piece.disk_name, piece.disk) == ("model.layers.3.k", (slice(0, 4), slice(0, 5)))
    (piece,) = FUSED_AND_APART.find_stored("layers.3.k", SHAPES, {"model.layers.3.qkv"})
    assert (piece.disk_name, piece.disk_shape) == ("model.layers.3.qkv", (16, 5))
    assert piece.disk == (slice(8, 12), slice(0, 5))
    assert FUSED_AND_APART.find_stored("layers.3.k", SHAPES, {"model.layers.4.qkv"}) is None


def test_layer_numbers_stay_and_nothing_else_matches():
    assert [p.disk_name for p in next(FUSED_AND_APART.layouts("layers.3.q", SHAPES))] == ["model.layers.3.q"]
    assert list(FUSED_AND_APART.layouts("layers.three.q", {"layers.three.q": (1,)})) == []
    assert FUSED_AND_APART.is_ignored("model.layers.12.inv_freq")
    assert not FUSED_AND_APART.is_ignored("model.layers.12.inv_freq.more")


def test_a_stack_is_a_tensor_for_each_expert():
    row = Stacked("layers.{layer}.experts", "layers.{layer}.{expert}.weight")
    pieces = row.pieces("layers.1.experts", {"layers.1.experts": (3, 4, 5)})
    assert [piece.disk_name for piece in pieces] == [f"layers.1.{expert}.weight" for expert in range(3)]
    assert {piece.disk_shape for piece in pieces} == {(4, 5)}
    # A rank with experts 1 and 2, and of these rows 1 to 3.
    overlaps = [intersect(piece, (slice(1, 3), slice(1, 3), slice(0, 5))) for piece in pieces]
    assert overlaps[0] is None
    assert [overlap.ours[0] for overlap in overlaps[1:]] == [slice(0, 1), slice(1, 2)]
    assert all(overlap.disk == (slice(1, 3), slice(0, 5)) for overlap in overlaps[1:])


def test_a_box_of_a_fused_tensor_is_found_where_it_lies():
    whole = torch.arange(16 * 5).reshape(16, 5)
    values = dict(zip("qkv", whole.split([8, 4, 4]), strict=True))
    for name, tensor in values.items():
        fqn = f"layers.3.{name}"
        (piece,) = FUSED_AND_APART.find_stored(fqn, SHAPES, {"model.layers.3.qkv"})
        for box in (whole_box(SHAPES[fqn]), (slice(1, 3), slice(2, 5)), (slice(3, 4), slice(0, 1))):
            assert torch.equal(whole[intersect(piece, box).disk], tensor[box])
    assert intersect(piece, (slice(2, 2), slice(0, 5))) is None
