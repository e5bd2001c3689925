from __future__ import annotations

from pathlib import Path

from torchtrain.config.reference import field_docstrings, render_reference
from torchtrain.config.schema import job_keys

PAGE = Path(__file__).parents[3] / "docs" / "config_reference.md"


def test_committed_page_is_current():
    command = "python -m torchtrain.config.reference > docs/config_reference.md"
    assert PAGE.read_text() == render_reference(), f"run {command}"


def test_every_key_is_explained_under_its_field():
    for key in job_keys().values():
        if key.subsection is None:
            assert field_docstrings(key.owner)[key.attribute], key.path
