"""Write a resolved job back to YAML: every section, every default, ready to run again."""

from __future__ import annotations

import io

from pydantic import TypeAdapter
from ruamel.yaml import YAML

from torchtrain.config.job import Job


def dump_job(job: Job) -> str:
    """The job as YAML; loading it gives an equal job."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # sections in the order in which the reference page lists them
    yaml.allow_unicode = True
    stream = io.StringIO()
    yaml.dump(TypeAdapter(Job).dump_python(job, mode="json", by_alias=True), stream)
    return stream.getvalue()
