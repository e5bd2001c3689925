"""Faults that need the model or the disk, found before there is a process group."""

from __future__ import annotations

import pytest

from models.registry import load_spec, resolve_architecture
from torchtrain.config.load import load_job
from torchtrain.errors import ConfigError
from torchtrain.trainer.preflight import find_file_errors, refuse_what_the_model_rules_out

TINY = "model.overrides={hidden_size: 32, num_hidden_layers: 1, vocab_size: 259}"


def job_of(*overrides):
    return load_job(None, ["dataset.sources=[{path: nowhere}]", TINY, *overrides])


def refuse(job):
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    refuse_what_the_model_rules_out(job, load_spec(job.model.name), architecture)


def test_a_job_that_fits_its_model_passes():
    refuse(job_of("fsdp_config.replicate_params=['*norm.weight']"))


def test_all_faults_that_the_model_shows_are_listed_at_once():
    patterns = "fsdp_config.replicate_params=[nrm.weight, norm.weight, layers.7.*]"
    with pytest.raises(ConfigError) as caught:
        refuse(job_of(patterns, "optimizer.no_decay=['*bais']", "optimizer.options={momentun: 1}"))
    assert [(fault.path, fault.value) for fault in caught.value.faults] == [
        ("optimizer.options.momentun", 1),
        ("optimizer.no_decay", "*bais"),
        ("fsdp_config.replicate_params", "nrm.weight"),
        ("fsdp_config.replicate_params", "layers.7.*"),
    ]
    assert "norm.weight" in caught.value.faults[2].fix


def test_every_file_that_is_missing_is_named(tmp_path):
    (tmp_path / "corpus.txt").write_text("words")
    job = load_job(
        None,
        [
            f"dataset.sources=[{{path: {tmp_path}/corpus.txt}}, {{path: {tmp_path}/b}}, {{path: {tmp_path}/c.txt}}]",
            f"tokenizer.path={tmp_path}/t.model",
            f"checkpoint.resume={tmp_path}/step_00000007",
        ],
    )
    errors = [str(error).partition(":")[0] for error in find_file_errors(job)]
    assert errors == [str(tmp_path / name) for name in ("b", "c.txt", "t.model", "step_00000007")]


def test_files_that_are_there_and_a_resume_that_may_find_nothing_are_no_errors(tmp_path):
    (tmp_path / "corpus.txt").write_text("words")
    job = load_job(None, [f"dataset.sources=[{{path: {tmp_path}/corpus.txt}}]", "checkpoint.resume=auto"])
    assert list(find_file_errors(job)) == []


def test_an_export_that_hugging_face_cannot_express_is_refused_before_training():
    overrides = "model.overrides={num_hidden_layers: 1, router_bias_update_rate: 0.1}"
    keys = ("model.name=qwen3_moe", overrides, "dataset.sources=[{path: nowhere}]")
    refuse(load_job(None, keys))
    with pytest.raises(ConfigError) as caught:
        refuse(load_job(None, [*keys, "checkpoint.export_hf=true"]))
    assert [fault.path for fault in caught.value.faults] == ["model.overrides.router_bias_update_rate"]
