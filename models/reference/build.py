"""Which reference computes which family, and how its config is read off the family's architecture."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from torch import nn

from models.reference.dense import ReferenceConfig, ReferenceDecoder
from models.reference.moe import ReferenceMoEConfig, build_reference_moe
from models.reference.qwen3_5 import ReferenceHybridConfig, ReferenceHybridDecoder


def build_reference(family: str, architecture: Any) -> nn.Module:
    """Build the oracle of a family, whose state dict loads into it; values are those of ``torch.nn``.

    Args:
        family: As in ``model.name``.
        architecture: The family's.
    """
    values = {"rope_scaling": None, "attention_bias": False, **asdict(architecture)}
    layers = range(architecture.num_hidden_layers)
    if family.startswith("qwen3_5"):
        kinds = tuple("full_attention" if architecture.attends(layer) else "linear_attention" for layer in layers)
        values |= {"layer_types": kinds, "norm_topk_prob": True, "sparse_layers": tuple(layers)}
        values["intermediate_size"] = architecture.intermediate_size
        experts = _read(ReferenceMoEConfig, values) if family == "qwen3_5_moe" else None
        return ReferenceHybridDecoder(_read(ReferenceHybridConfig, values), experts)
    values |= {"has_qkv_bias": family == "qwen2", "has_qk_norm": family.startswith("qwen3")}
    if family == "qwen3_moe":
        values["sparse_layers"] = tuple(layer for layer in layers if architecture.has_experts(layer))
        return build_reference_moe(_read(ReferenceConfig, values), _read(ReferenceMoEConfig, values))
    return ReferenceDecoder(_read(ReferenceConfig, values))


def _read(kind: type[Any], values: dict[str, Any]) -> Any:
    return kind(**{field.name: values[field.name] for field in fields(kind)})
