"""What fills a model: every parameter and every tensor on disk is accounted for, and the rest is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from models.registry import load_spec, resolve_architecture
from torchtrain.checkpoint.hf_folder import SliceReader, StoredTensor, open_folder
from torchtrain.checkpoint.hf_import import (
    load_weights,
    plan_folder_import,
    plan_import,
    read_model_names,
    refuse_incomplete,
)
from torchtrain.errors import WeightsError

SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 4}
MOE = {**SIZES, "num_experts": 3, "moe_intermediate_size": 4}


def build(family="llama", **changes):
    sizes = MOE if family == "qwen3_moe" else SIZES
    model = load_spec(family).build(resolve_architecture(family, "debug", {**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def tensors_of(model, family="llama"):
    """As the family's map writes them."""
    names = read_model_names(model)
    return {
        piece.disk_name: model.get_parameter(fqn).detach()[piece.ours].reshape(piece.disk_shape)
        for fqn in names.shapes
        for piece in next(load_spec(family).hugging_face.weights.layouts(fqn, names.shapes))
    }


def write(folder, tensors, config=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_folder(folder)


def plan(model, folder, family="llama", **keys):
    return plan_import(read_model_names(model), folder.tensors, load_spec(family).hugging_face.weights, **keys)


def fill(model, folder, family="llama", **keys):
    report = plan(model, folder, family, **keys)
    refuse_incomplete(report, folder)
    with SliceReader(folder) as reader:
        load_weights(model, report, reader)
    return report


def same(left, right):
    return all(torch.equal(p, q) for p, q in zip(left.parameters(), right.parameters(), strict=True))


def test_everything_that_does_not_fit_is_named_at_once(tmp_path):
    model = build()
    tensors = tensors_of(model)
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(5, 8)
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(8, 6, dtype=torch.int8)
    tensors["model.layers.1.input_layernorm.weight"] = torch.zeros(8)
    folder = write(tmp_path / "in", tensors)
    with pytest.raises(WeightsError) as caught:
        fill(model, folder)
    assert caught.value.exit_code == 2
    layer = f"{folder.path}: model.layers.0"
    assert [(fault.path, fault.value, fault.rule) for fault in caught.value.faults] == [
        (f"{folder.path}: model.norm.weight", None, "must be on disk: norm.weight of the model is made of it"),
        (f"{folder.path}: model.layers.1.input_layernorm.weight", "F32 [8]", "is no part of the model"),
        (f"{layer}.mlp.up_proj.weight", [5, 8], "must be of shape [6, 8]"),
        (f"{layer}.mlp.down_proj.weight", "I8", "must be F64, F32, F16, BF16"),
    ]


def test_many_faults_of_a_kind_are_counted_rather_than_listed(tmp_path):
    with pytest.raises(WeightsError) as caught:
        fill(build(), write(tmp_path / "in", {"model.norm.weight": torch.ones(8)}))
    assert len(caught.value.faults) == 8
    assert "(and 3 more like it)" in caught.value.faults[-1].rule


def test_an_untied_model_takes_its_head_from_a_tied_checkpoint_and_from_no_other(tmp_path):
    source, target = build(tie_word_embeddings=True), build(tie_word_embeddings=False)
    tensors, hugging_face = tensors_of(source), load_spec("llama").hugging_face
    names = read_model_names(target)
    tied = write(tmp_path / "tied", tensors, {"tie_word_embeddings": True})
    report = plan_folder_import(names, tied, hugging_face)
    assert "from what they are tied to on disk (lm_head.weight)" in report.describe()
    with SliceReader(tied) as reader:
        load_weights(target, report, reader)
    assert torch.equal(target.lm_head.weight, source.embed_tokens.weight)
    assert target.lm_head.weight is not target.embed_tokens.weight
    with pytest.raises(WeightsError, match=r"lm_head\.weight = null: must be on disk"):
        plan_folder_import(names, write(tmp_path / "lost", tensors, {"tie_word_embeddings": False}), hugging_face)


def test_one_expert_that_is_missing_is_not_overlooked(tmp_path):
    model = build("qwen3_moe")
    tensors = tensors_of(model, "qwen3_moe")
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    report = plan(model, write(tmp_path / "in", tensors), "qwen3_moe")
    assert report.missing == {"layers.0.mlp.experts.up_proj": ("model.layers.0.mlp.experts.2.up_proj.weight",)}
    assert len(report.unused) == 2


def test_fused_experts_load_as_separate_ones_do(tmp_path):
    source, target = build("qwen3_moe"), build("qwen3_moe")
    tensors = {name: t for name, t in tensors_of(source, "qwen3_moe").items() if ".experts." not in name}
    experts = source.get_submodule("layers.0.mlp.experts")
    prefix = "model.layers.0.mlp.experts"
    tensors[f"{prefix}.gate_up_proj"] = torch.cat([experts.gate_proj, experts.up_proj], dim=1).detach()
    tensors[f"{prefix}.down_proj"] = experts.down_proj.detach()
    fill(target, write(tmp_path / "in", tensors), "qwen3_moe")
    assert same(source, target)


def test_what_may_be_missing_and_buffers_are_listed_as_initialised(tmp_path):
    model = build("qwen3_moe", router_bias_update_rate=0.1, tie_word_embeddings=False)
    tensors = tensors_of(model, "qwen3_moe")
    del tensors["lm_head.weight"]
    report = fill(model, write(tmp_path / "in", tensors), "qwen3_moe", may_be_missing=("lm_head.*",))
    assert set(report.initialised) == {"lm_head.weight", "layers.0.mlp.router.expert_bias"}
    assert "lm_head.weight" in report.describe()


def test_a_tied_head_loads_from_either_name_and_must_be_one_tensor(tmp_path):
    source, target = build(tie_word_embeddings=True), build(tie_word_embeddings=True)
    tensors = tensors_of(source)
    embedding = tensors.pop("model.embed_tokens.weight")
    fill(target, write(tmp_path / "head", {**tensors, "lm_head.weight": embedding}))
    assert same(source, target)
    both = {**tensors, "model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    report = fill(target, write(tmp_path / "both", both))
    assert list(report.tied_copies) == ["embed_tokens.weight"]
    with pytest.raises(WeightsError, match=r"lm_head\.weight = .* is another tensor than embed_tokens\.weight"):
        fill(target, write(tmp_path / "other", {**both, "lm_head.weight": embedding + 1}))


def test_old_rotary_buffers_are_told_of_and_left_unread(tmp_path):
    model = build()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    report = fill(model, write(tmp_path / "in", {**tensors_of(model), name: torch.ones(2)}))
    assert report.ignored == (name,)


def test_values_are_rounded_to_the_parameters_dtype(tmp_path):
    source = build()
    target = build().bfloat16()
    fill(target, write(tmp_path / "in", tensors_of(source)))
    assert same(source.bfloat16(), target)


def test_a_report_needs_no_file(tmp_path):
    model = build()
    stored = {n: StoredTensor(tmp_path, "BF16", tuple(t.shape)) for n, t in tensors_of(model).items()}
    weights = load_spec("llama").hugging_face.weights
    assert plan_import(read_model_names(model), stored, weights).is_complete
    stored["lm_head.weight"] = replace(stored["lm_head.weight"], dtype="F8_E4M3")
    assert plan_import(read_model_names(model), stored, weights).wrong_dtype == ("lm_head.weight",)
