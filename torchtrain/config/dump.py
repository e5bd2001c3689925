"""Write a resolved job back to YAML: every section, every default, ready to run again."""

from __future__ import annotations

import io
import json

from pydantic import TypeAdapter
from ruamel.yaml import YAML

from torchtrain.config.job import Job


def dump_job(job: Job) -> str:
    """The job as YAML; loading it gives an equal job."""
    tree = TypeAdapter(Job).dump_python(job, mode="json", by_alias=True)
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # sections in the order in which the reference page lists them
    # Readable, but ruamel then writes U+0085 as it is and reads it back as a space: such a job is escaped throughout.
    yaml.allow_unicode = "\x85" not in json.dumps(tree, ensure_ascii=False)
    stream = io.StringIO()
    yaml.dump(tree, stream)
    return stream.getvalue()
