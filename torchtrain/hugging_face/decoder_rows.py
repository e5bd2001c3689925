"""The rows that every decoder has: a ``Decoder``'s names are Hugging Face's without the leading ``model.``.

Rows of parameters that a family lacks say nothing. Rows of queries and keys are in Hugging Face's order already: see
``RotaryTable.rotate``.
"""

from __future__ import annotations

from torchtrain.hugging_face.weight_map import Renamed

_OF_A_LAYER = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}_proj.{part}" for name in "qkvo" for part in ("weight", "bias")),
    *(f"self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
DECODER_ROWS = (
    Renamed("embed_tokens.weight", "model.embed_tokens.weight"),
    *(Renamed(f"layers.{{layer}}.{name}", f"model.layers.{{layer}}.{name}") for name in _OF_A_LAYER),
    Renamed("norm.weight", "model.norm.weight"),
    Renamed("lm_head.weight", "lm_head.weight"),
)
TIED_HEAD = {"lm_head.weight": "embed_tokens.weight"}
"""Head to the parameter whose values are its own where a checkpoint is tied."""
OLD_BUFFERS = ("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)
"""What versions of Hugging Face before 4.32 saved beside the weights."""
