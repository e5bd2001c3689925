"""Model and techniques together: what a family cannot do, and every condition that sizes must meet."""

from __future__ import annotations

from models.registry import resolve_architecture
from torchtrain.config.load import read_job
from torchtrain.distributed.legality import find_legality_faults, techniques_in_use
from torchtrain.errors import Fault


def faults_of(*overrides: str, **unsupported: str) -> list[Fault]:
    job = read_job(None, list(overrides)).job
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    named = {name.replace("_", " "): reason for name, reason in unsupported.items()}
    return find_legality_faults(architecture, job, family="llama", unsupported=named)


def test_what_a_family_cannot_do_is_refused_by_name_with_the_reason() -> None:
    (fault,) = faults_of("accelerator.pp_size=2", pipeline_parallel="its layers are one")
    assert fault.path == "accelerator.pp_size"
    assert "pipeline parallel is not possible with llama: its layers are one" in fault.rule


def test_a_technique_that_is_not_in_use_is_not_held_against_a_job() -> None:
    assert faults_of(pipeline_parallel="its layers are one") == []


def test_techniques_are_read_off_the_sizes() -> None:
    job = read_job(None, ["accelerator={tp_size: 2, cp_size: 2, cp_mode: ring, sequence_parallel: true}"]).job
    assert list(techniques_in_use(job)) == ["tensor parallel", "sequence parallel", "context parallel, ring"]
