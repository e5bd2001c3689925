"""All that a family says about its Hugging Face checkpoints, in one record."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import WeightMap


@dataclass(frozen=True)
class HuggingFaceFormat:
    """Config file and weights of a family."""

    config: ConfigFormat
    weights: WeightMap
