from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from models.registry import FAMILIES, load_spec, resolve_architecture
from torchtrain.errors import ConfigError


def resolve(preset: str, overrides: dict[str, Any]) -> Any:
    return resolve_architecture("llama", preset, overrides)


def faults_of(name="llama", preset="debug", **overrides):
    with pytest.raises(ConfigError) as caught:
        resolve_architecture(name, preset, overrides)
    return {fault.path: fault for fault in caught.value.faults}


def test_resolving_imports_no_torch():
    program = (
        "import sys, models.registry as r; r.resolve_architecture('llama', '8b', {}); print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_every_family_has_its_own_spec():
    assert [load_spec(name).name for name in FAMILIES] == list(FAMILIES)


def test_overrides_replace_preset_fields():
    architecture = resolve("8b", {"num_hidden_layers": 3, "rope_theta": 10_000})
    assert architecture.num_hidden_layers == 3
    assert architecture.rope_theta == 10_000.0
    assert architecture.hidden_size == 4096


def test_an_override_of_a_nested_key_keeps_its_neighbours():
    scaling = resolve("8b", {"rope_scaling": {"factor": 2.0}}).rope_scaling
    assert (scaling.factor, scaling.high_freq_factor, scaling.original_max_position_embeddings) == (2.0, 4.0, 8192)
    assert resolve("8b", {"rope_scaling": None}).rope_scaling is None


def test_unknown_names_are_refused_with_the_nearest():
    assert 'did you mean "llama"?' in faults_of(name="lama")["model.name"].fix
    assert "1b" in faults_of(preset="2b")["model.preset"].fix
    assert 'did you mean "hidden_size"?' in faults_of(hiden_size=64)["model.overrides.hiden_size"].fix
    with pytest.raises(ConfigError):
        load_spec("lama")


def test_all_faults_are_reported_together():
    faults = faults_of(
        hiden_size=3, vocab_size=1.5, rope_theta="x", num_key_value_heads=3, head_dim=31, hidden_size=100
    )
    assert faults.keys() == {
        f"model.overrides.{field}"
        for field in ("hiden_size", "vocab_size", "rope_theta", "num_key_value_heads", "head_dim", "hidden_size")
    }
    assert faults["model.overrides.num_key_value_heads"].fix == "use one of 1, 2, 4, 8"
    assert all(fault.rule and fault.fix for fault in faults.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 0),
        ("vocab_size", -1),
        ("num_attention_heads", 0),
        ("num_hidden_layers", True),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", None),
        ("tie_word_embeddings", 1),
        ("rms_norm_eps", 0.0),
        ("rope_theta", float("inf")),
        ("rope_theta", float("nan")),
        ("initializer_range", -0.1),
        ("rope_scaling", 8.0),
    ],
)
def test_a_senseless_value_is_refused_by_its_path(field, value):
    assert faults_of(**{field: value}).keys() == {f"model.overrides.{field}"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 0.5),
        ("factor", "8"),
        ("low_freq_factor", 5.0),
        ("original_max_position_embeddings", 0),
        ("rope_type", "yarn"),
        ("beta", 1.0),
    ],
)
def test_a_senseless_scaling_is_refused_by_its_path(key, value):
    assert faults_of(preset="8b", rope_scaling={key: value}).keys() == {f"model.overrides.rope_scaling.{key}"}


def test_a_scaling_without_its_factor_is_refused():
    assert faults_of(rope_scaling={}).keys() == {"model.overrides.rope_scaling.factor"}
