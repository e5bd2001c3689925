"""``config.json`` against architectures: what is written, what is left out, and every difference by field."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from transformers import AutoConfig

from models.llama.architecture import PRESETS as LLAMAS
from models.registry import load_spec, resolve_architecture
from torchtrain.hugging_face.model_config import compare_config, find_export_faults, read_fields, write_config

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe")


def format_of(family):
    return load_spec(family).hugging_face.config


def compare(config, architecture, family="llama", overridden=()):
    return compare_config(config, architecture, format_of(family), overridden=overridden, where="config.json")


def presets():
    for family in FAMILIES:
        module = __import__(f"models.{family}.architecture", fromlist=["PRESETS"])
        yield from ((family, preset) for preset in module.PRESETS)


@pytest.mark.parametrize(("family", "preset"), list(presets()))
def test_what_is_written_reads_back_without_a_difference_here_and_in_hugging_face(family, preset, tmp_path):
    architecture = resolve_architecture(family, preset, {})
    written = json.loads(json.dumps(write_config(architecture, format_of(family), dtype="bfloat16")))
    comparison = compare(written, architecture, family)
    assert (comparison.faults, comparison.notes) == ((), ())
    (tmp_path / "config.json").write_text(json.dumps(written))
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert compare(theirs, architecture, family).faults == ()
    assert theirs["architectures"] == [format_of(family).class_name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_the_file_leaves_out_has_hugging_faces_default(family):
    sizes = {name: value for name, value in asdict(resolve_architecture(family, "debug", {})).items() if "size" in name}
    theirs = AutoConfig.for_model(format_of(family).model_type, **sizes).to_dict()
    explicit = read_fields(theirs, format_of(family))
    left_out = read_fields({**sizes, "num_attention_heads": theirs["num_attention_heads"]}, format_of(family))
    for name in format_of(family).defaults:
        assert left_out[name] == explicit[name], name
    assert left_out["rope_scaling"] is explicit["rope_scaling"] is None


def test_old_and_new_spellings_of_rotary_settings_mean_the_same():
    llama = LLAMAS["8b"]
    new = write_config(llama, format_of("llama"), dtype="float32")
    old = {name: value for name, value in new.items() if name != "rope_parameters"}
    newest = {name: value for name, value in new.items() if name not in ("rope_scaling", "rope_theta")}
    for config in (old, newest):
        assert compare(config, llama).faults == ()


def test_every_difference_is_listed_by_field_with_what_to_set():
    architecture = replace(LLAMAS["debug"], rope_theta=5e5, num_hidden_layers=7)
    config = write_config(LLAMAS["debug"], format_of("llama"), dtype="float32") | {"hidden_act": "gelu"}
    comparison = compare({**config, "quantization_config": {"bits": 4}}, architecture)
    assert {fault.path for fault in comparison.faults} == {
        "config.json: hidden_act",
        "config.json: quantization_config",
        "model.overrides.rope_theta",
        "model.overrides.num_hidden_layers",
    }
    assert "set model.overrides.num_hidden_layers to 4" in str(comparison.faults[2])


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({}, "set model.preset: 0.6b, which has them all"),
        ({"vocab_size": 9}, "no preset has them: set each as below"),
    ],
)
def test_where_much_differs_the_preset_comes_first_and_the_one_that_fits_is_named(changes, hint):
    presets = load_spec("qwen3").presets
    config = write_config(replace(presets["0.6b"], **changes), format_of("qwen3"), dtype="float32")
    comparison = compare_config(
        config,
        replace(presets["debug"], rms_norm_eps=1.0),
        format_of("qwen3"),
        overridden=("rms_norm_eps",),
        where="config.json",
        preset="debug",
        presets=presets,
    )
    first, *others = comparison.faults
    assert str(first).startswith(f"model.preset = 'debug': must be of the weights' sizes: {len(others)} differ from")
    assert hint in first.fix
    assert all(fault.path.startswith("model.overrides.") for fault in others)


def test_where_little_differs_and_no_preset_fits_nothing_is_said_of_presets():
    presets = load_spec("qwen3").presets
    config = write_config(replace(presets["debug"], num_hidden_layers=7), format_of("qwen3"), dtype="float32")
    words = {"overridden": (), "where": "config.json", "preset": "debug", "presets": presets}
    (fault,) = compare_config(config, presets["debug"], format_of("qwen3"), **words).faults
    assert fault.path == "model.overrides.num_hidden_layers"


def test_a_difference_that_the_job_asks_for_is_told_and_not_refused():
    architecture = replace(LLAMAS["debug"], rope_theta=5e5, max_position_embeddings=64)
    config = write_config(LLAMAS["debug"], format_of("llama"), dtype="float32")
    comparison = compare(config, architecture, overridden=("rope_theta",))
    assert comparison.faults == ()
    assert comparison.notes == (
        "max_position_embeddings is 64 in the job and 4096 in config.json",
        "rope_theta is 500000.0 in the job and 10000.0 in config.json",
    )


def test_another_family_is_refused_by_its_name():
    config = write_config(resolve_architecture("qwen3", "debug", {}), format_of("qwen3"), dtype="float32")
    (fault,) = compare(config, LLAMAS["debug"]).faults
    assert fault.path == "model.name"
    assert "'qwen3'" in fault.rule


def test_rotary_scaling_that_a_family_lacks_is_refused():
    architecture = resolve_architecture("qwen3", "debug", {})
    config = write_config(architecture, format_of("qwen3"), dtype="float32")
    config["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": architecture.rope_theta}
    (fault,) = compare(config, architecture, "qwen3").faults
    assert fault.path == "config.json: rope_scaling"


@pytest.mark.parametrize("rope_scaling", [{"rope_type": "yarn", "factor": 4.0}, [1]])
def test_the_older_word_for_rotary_settings_goes_first_as_in_hugging_face(rope_scaling: object) -> None:
    architecture = resolve_architecture("qwen3", "debug", {})
    config = write_config(architecture, format_of("qwen3"), dtype="float32")
    assert config["rope_parameters"]["rope_type"] == "default"
    (fault,) = compare({**config, "rope_scaling": rope_scaling}, architecture, "qwen3").faults
    assert fault.path == "config.json: rope_scaling"


def test_token_ids_of_the_source_are_kept():
    source = {"bos_token_id": 1, "eos_token_id": [2, 3], "vocab_size": 9}
    written = write_config(LLAMAS["debug"], format_of("llama"), dtype="float32", source=source)
    assert (written["bos_token_id"], written["eos_token_id"], written["vocab_size"]) == (1, [2, 3], 4096)


def test_what_hugging_face_cannot_express_is_not_exported():
    plain = resolve_architecture("qwen3_moe", "debug", {"router_z_loss_coef": 0.1})
    assert find_export_faults(plain, format_of("qwen3_moe")) == []
    overrides = {"shared_expert_intermediate_size": 64, "router_bias_update_rate": 0.1}
    faults = find_export_faults(resolve_architecture("qwen3_moe", "debug", overrides), format_of("qwen3_moe"))
    assert [fault.path for fault in faults] == [f"model.overrides.{name}" for name in overrides]


def test_layers_named_one_by_one_and_by_interval_are_compared_as_layers():
    family, preset = "qwen3_5_moe", resolve_architecture("qwen3_5_moe", "debug", {})
    written = write_config(preset, format_of(family), dtype="float32")
    assert written["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    named = resolve_architecture(family, "debug", {"layer_types": written["layer_types"]})
    assert compare(written, named, family).faults == ()
    other = resolve_architecture(family, "debug", {"full_attention_interval": 2})
    (fault,) = compare(written, other, family).faults
    assert fault.path == "model.overrides.layer_types"
    scaled = {**written, "rope_parameters": {**written["rope_parameters"], "partial_rotary_factor": 0.5}}
    (fault,) = compare(scaled, preset, family).faults
    assert fault.path == "model.overrides.partial_rotary_factor"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_multimodal_config_is_read_and_what_the_outer_class_says_of_weights_goes_first(family):
    preset = resolve_architecture(family, "debug", {"tie_word_embeddings": True})
    text = write_config(preset, format_of(family), dtype="bfloat16") | {"eos_token_id": 5, "attn_output_gate": True}
    outer = {"model_type": format_of(family).multimodal_type, "vision_config": {"depth": 2, "hidden_size": 9}}
    both = {**outer, "text_config": text, "hidden_size": 7}
    assert compare(both, preset, family) == compare(text, preset, family)
    assert compare(text, preset, family).faults == ()
    assert read_fields(both, format_of(family)) == read_fields(text, format_of(family))
    assert write_config(preset, format_of(family), dtype="float32", source=both)["eos_token_id"] == 5

    untied = compare({**both, "tie_word_embeddings": False, "quantization_config": {"bits": 4}}, preset, family)
    assert [fault.path for fault in untied.faults] == [
        "config.json: quantization_config",
        "model.overrides.tie_word_embeddings",
    ]
    (fault,) = compare({**both, "text_config": {**text, "attn_output_gate": False}}, preset, family).faults
    assert fault.path == "config.json: attn_output_gate"
    (fault,) = compare({**both, "model_type": "qwen3_vl"}, preset, family).faults
    assert fault.path == "model.name"
