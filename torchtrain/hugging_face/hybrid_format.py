"""What Qwen3.5's text sides have in common on disk, whether alone or as the language model of a multimodal folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torchtrain.hugging_face.decoder_rows import DECODER_ROWS
from torchtrain.hugging_face.weight_map import Fused, Renamed, Stacked

_DELTA_NET = (
    *(f"in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")),
    "conv1d.weight",
    "dt_bias",
    "A_log",
    "norm.weight",
    "out_proj.weight",
)
HYBRID_ROWS = (
    *DECODER_ROWS,
    *(
        Renamed(f"layers.{{layer}}.linear_attn.{name}", f"model.layers.{{layer}}.linear_attn.{name}")
        for name in _DELTA_NET
    ),
)
OTHER_PARTS = ("model.visual.", "mtp.")
"""How names begin of what published folders hold beside the text side: the vision encoder, and a layer that predicts
several tokens ahead. Hugging Face's text classes leave them unread too (``_keys_to_ignore_on_load_unexpected``)."""

# Those of Hugging Face's Qwen3_5TextConfig and Qwen3_5MoeTextConfig.
HYBRID_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "full_attention_interval": 4,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
HYBRID_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attn_output_gate": (True,),
    "mlp_only_layers": ([], None),
}


def in_language_model(rows: Iterable[Renamed | Stacked | Fused]) -> tuple[Renamed | Stacked | Fused, ...]:
    """Write rows once more with the names that a multimodal folder has, ``model.language_model.`` for ``model.``."""
    return tuple(
        replace(row, disk=row.disk.replace("model.", "model.language_model.", 1))
        for row in rows
        if row.disk.startswith("model.")
    )


def name_every_layer(fields: dict[str, Any]) -> dict[str, Any]:
    """Spell ``full_attention_interval`` out as ``layer_types``."""
    interval, types = fields.get("full_attention_interval"), fields.get("layer_types")
    if types is None and interval:
        layers = range(1, fields["num_hidden_layers"] + 1)
        types = ["linear_attention" if layer % interval else "full_attention" for layer in layers]
    rest = {name: value for name, value in fields.items() if name != "full_attention_interval"}
    return {**rest, "layer_types": types}
