"""Checkpoints of the text side of Qwen3.5 with experts as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.hybrid_format import (
    HYBRID_DEFAULTS,
    HYBRID_FIXED,
    HYBRID_ROWS,
    OTHER_PARTS,
    in_language_model,
    name_every_layer,
)
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import Fused, Renamed, Stacked, WeightMap

_OURS, _THEIRS = "layers.{layer}.mlp", "model.layers.{layer}.mlp"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

ROWS = (
    *HYBRID_ROWS,
    *(
        Renamed(f"{_OURS}.{name}.weight", f"{_THEIRS}.{name}.weight")
        for name in (*(f"shared_expert.{name}" for name in _PROJECTIONS), "shared_expert_gate")
    ),
    Renamed(f"{_OURS}.router.weight", f"{_THEIRS}.gate.weight"),
    *(Stacked(f"{_OURS}.experts.{name}", f"{_THEIRS}.experts.{{expert}}.{name}.weight") for name in _PROJECTIONS),
    # As Hugging Face keeps them in memory, and on disk where it is told to save them so: gate above up.
    Fused((f"{_OURS}.experts.gate_proj", f"{_OURS}.experts.up_proj"), f"{_THEIRS}.experts.gate_up_proj", dim=1),
    Renamed(f"{_OURS}.experts.down_proj", f"{_THEIRS}.experts.down_proj"),
)

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        multimodal_type="qwen3_5_moe",
        defaults={**HYBRID_DEFAULTS, "router_aux_loss_coef": 0.001},
        fixed=HYBRID_FIXED,
        written={"hidden_act": "silu"},
        only_here={
            "router_bias_update_rate": (0.0,),
            "router_aux_loss_scope": (),
            "router_z_loss_coef": (),
        },
        resolve=name_every_layer,
        training=("initializer_range", "max_position_embeddings", "router_aux_loss_coef"),
    ),
    weights=WeightMap(rows=(*ROWS, *in_language_model(ROWS)), ignored_prefixes=OTHER_PARTS),
)
