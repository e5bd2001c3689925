"""Checkpoints of the text side of Qwen3.5 with experts as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from typing import Any

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import DECODER_ROWS
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import Fused, Renamed, Stacked, WeightMap

_OURS, _THEIRS = "layers.{layer}", "model.layers.{layer}"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_DELTA_NET = (
    *(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")),
    "linear_attn.conv1d.weight",
    "linear_attn.dt_bias",
    "linear_attn.A_log",
    "linear_attn.norm.weight",
    "linear_attn.out_proj.weight",
)
_SHARED = (
    *(f"mlp.shared_expert.{name}.weight" for name in _PROJECTIONS),
    "mlp.shared_expert_gate.weight",
)

ROWS = (
    *DECODER_ROWS,
    *(Renamed(f"{_OURS}.{name}", f"{_THEIRS}.{name}") for name in (*_DELTA_NET, *_SHARED)),
    Renamed(f"{_OURS}.mlp.router.weight", f"{_THEIRS}.mlp.gate.weight"),
    *(
        Stacked(f"{_OURS}.mlp.experts.{name}", f"{_THEIRS}.mlp.experts.{{expert}}.{name}.weight")
        for name in _PROJECTIONS
    ),
    # As Hugging Face keeps them in memory, and on disk where it is told to save them so: gate above up.
    Fused(
        (f"{_OURS}.mlp.experts.gate_proj", f"{_OURS}.mlp.experts.up_proj"),
        f"{_THEIRS}.mlp.experts.gate_up_proj",
        dim=1,
    ),
    Renamed(f"{_OURS}.mlp.experts.down_proj", f"{_THEIRS}.mlp.experts.down_proj"),
)


def _name_every_layer(fields: dict[str, Any]) -> dict[str, Any]:
    """Spell ``full_attention_interval`` out as ``layer_types``."""
    interval, types = fields.get("full_attention_interval"), fields.get("layer_types")
    if types is None and interval:
        layers = range(1, fields["num_hidden_layers"] + 1)
        types = ["linear_attention" if layer % interval else "full_attention" for layer in layers]
    rest = {name: value for name, value in fields.items() if name != "full_attention_interval"}
    return {**rest, "layer_types": types}


HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen3_5_moe_text",
        class_name="Qwen3_5MoeForCausalLM",
        # Those of Hugging Face's Qwen3_5MoeTextConfig.
        defaults={
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "full_attention_interval": 4,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "router_aux_loss_coef": 0.001,
        },
        fixed={"hidden_act": ("silu",)},
        written={"hidden_act": "silu"},
        only_here={
            "router_bias_update_rate": (0.0,),
            "router_aux_loss_scope": (),
            "router_z_loss_coef": (),
        },
        resolve=_name_every_layer,
        training=("initializer_range", "max_position_embeddings", "router_aux_loss_coef"),
    ),
    weights=WeightMap(rows=ROWS),
)
