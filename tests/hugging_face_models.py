"""Tiny models that Hugging Face itself made and saved, one per family, and the jobs that start from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from models.registry import load_spec, resolve_architecture
from tests.distributed.hugging_face_runs import fixed_tokens
from torchtrain.checkpoint.hf_folder import SliceReader, open_folder
from torchtrain.hugging_face.model_config import read_overrides
from torchtrain.hugging_face.weight_map import whole_box

# Odd sizes where tensor parallelism lets them be: of two ranks one gets more rows of the vocabulary.
SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 36,
    "intermediate_size": 38,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "rope_theta": 10_000.0,
}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    # Less would blow up rounding: see tests/parity/test_qwen3_5_moe_oracles.py.
    "rms_norm_eps": 1e-3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True},
    "llama_untied": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {
        "moe_intermediate_size": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_5": {**HYBRID, "tie_word_embeddings": True},
    "qwen3_5_moe": {
        **HYBRID,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 10,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
}


def family_of(kind: str) -> str:
    return kind.removesuffix("_untied")


def save_model(kind: str, folder: Path, *, max_shard_size: str = "5GB", **changes: Any) -> nn.Module:
    """Draw a model as large as its gradients of logits are visible, and let Hugging Face save it."""
    torch.manual_seed(7)
    model_type = load_spec(family_of(kind)).hugging_face.config.model_type
    config = AutoConfig.for_model(model_type, **(SIZES | FAMILIES[kind] | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_model(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def logits_of(model: nn.Module, vocab_size: int = SIZES["vocab_size"]) -> torch.Tensor:
    """Hugging Face's logits of fixed tokens."""
    with torch.no_grad():
        return model(fixed_tokens(vocab_size)).logits


def job_overrides(kind: str, folder: Path) -> tuple[str, ...]:
    """Words of a job whose architecture is what the folder's config says."""
    family = family_of(kind)
    known = vars(resolve_architecture(family, "debug", {}))
    overrides = json.dumps(read_overrides(open_folder(folder).config, load_spec(family).hugging_face.config, known))
    return (
        f"model.name={family}",
        f"model.overrides={overrides}",
        f"model.hf_path={folder}",
        "dataset.sources=[{path: unused}]",
        "training.seq_len=16",
        "training.global_batch_size=8",
        "training.micro_batch_size=1",
        "optimizer.fused=false",
        "accelerator.device=cpu",
    )


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    opened = open_folder(folder)
    with SliceReader(opened) as reader:
        return {name: reader.read(name, whole_box(stored.shape)) for name, stored in opened.tensors.items()}
