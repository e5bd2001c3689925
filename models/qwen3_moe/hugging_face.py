"""Checkpoints of a Qwen3 with experts as Hugging Face keeps them. Imports no torch."""

from __future__ import annotations

from torchtrain.hugging_face.checkpoint_format import HuggingFaceFormat
from torchtrain.hugging_face.decoder_rows import DECODER_ROWS
from torchtrain.hugging_face.model_config import ConfigFormat
from torchtrain.hugging_face.weight_map import Fused, Renamed, Stacked, WeightMap

_OURS, _THEIRS = "layers.{layer}.mlp", "model.layers.{layer}.mlp"
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

EXPERT_ROWS = (
    Renamed(f"{_OURS}.router.weight", f"{_THEIRS}.gate.weight"),
    *(Stacked(f"{_OURS}.experts.{name}", f"{_THEIRS}.experts.{{expert}}.{name}.weight") for name in _PROJECTIONS),
    # As Hugging Face keeps experts in memory, and on disk where it is told to save them so.
    Fused((f"{_OURS}.experts.gate_proj", f"{_OURS}.experts.up_proj"), f"{_THEIRS}.experts.gate_up_proj", dim=1),
    Renamed(f"{_OURS}.experts.down_proj", f"{_THEIRS}.experts.down_proj"),
    # No part of Hugging Face's qwen3_moe, named as its other families name it.
    *(Renamed(f"{_OURS}.shared_expert.{n}.weight", f"{_THEIRS}.shared_expert.{n}.weight") for n in _PROJECTIONS),
    Renamed(f"{_OURS}.shared_expert_gate.weight", f"{_THEIRS}.shared_expert_gate.weight"),
)

HUGGING_FACE = HuggingFaceFormat(
    config=ConfigFormat(
        model_type="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        # Those of Hugging Face's Qwen3MoeConfig.
        defaults={
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
        },
        fixed={"hidden_act": ("silu",), "use_sliding_window": (False,)},
        aliases={"num_local_experts": "num_experts"},
        written={"hidden_act": "silu", "use_sliding_window": False},
        only_here={
            "shared_expert_intermediate_size": (0,),
            "router_bias_update_rate": (0.0,),
            "router_aux_loss_scope": (),
            "router_z_loss_coef": (),
        },
        training=("initializer_range", "max_position_embeddings", "router_aux_loss_coef"),
    ),
    weights=WeightMap(rows=(*DECODER_ROWS, *EXPERT_ROWS)),
)
