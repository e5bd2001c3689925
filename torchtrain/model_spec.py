"""What a family tells the trainer about itself, in one frozen record.

Not a registry: ``models.registry`` finds families, and only the entry points read it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchtrain.config.job import Job
from torchtrain.distributed.meshes import Meshes
from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.nn.init import InitRule


@dataclass(frozen=True)
class ModelSpec:
    """A family, for whoever builds, shards, initialises and measures a model of it."""

    name: str
    """Family name, as in ``model.name``."""
    build: Callable[[Any], nn.Module]
    """Architecture in, single-device model out, on the current device context; parameter values are undefined."""
    parallelize: Callable[[nn.Module, Job, Meshes], tuple[nn.Module, ...]]
    """Applies every technique in the family's order, in place; returns what this rank calls.

    That is the model itself, or the stages of a pipeline that this rank holds: they share their parameters with the
    model, from which everything of other ranks has been removed.
    """
    init_rule: Callable[[Any, str], InitRule]
    """``(architecture, parameter fqn)`` to how that parameter is drawn."""
    flops_per_token: Callable[[Any, int], float]
    """``(architecture, seq_len)`` to training FLOPs per token, forward and backward; see ``nn.flops``."""
    hugging_face: HuggingFaceFormat
    """How its checkpoints look to Hugging Face."""
    presets: Mapping[str, Any]
    """Architectures by name, as in ``model.preset``."""
