"""Section ``model``: which family, which size, in which storage dtype."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchtrain.config.fsdp import DTypeName
from torchtrain.config.section import Section


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The model to train."""

    name: str = "llama"
    """Family: a folder of ``models/``."""
    preset: str = "debug"
    """A named size of the family."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Architecture fields that differ from the preset, in Hugging Face's words."""
    init_dtype: DTypeName = "float32"
    """Storage dtype of the parameters."""
    hf_path: str | None = None
    """Folder or file of Hugging Face safetensors to start from."""
    init_on_meta: bool = True
    """Build without memory, shard, then materialise only this rank's part."""
