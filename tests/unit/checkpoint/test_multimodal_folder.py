"""Qwen3.5 folders as they are published: a language model under names of its own, beside an encoder of pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from models.registry import load_spec, resolve_architecture
from tests.distributed.hugging_face_runs import fixed_tokens, travel
from tests.hugging_face_models import FAMILIES, SIZES, job_overrides, load_model, logits_of, stored_tensors
from torchtrain.checkpoint.hf_folder import SliceReader, open_folder
from torchtrain.checkpoint.hf_import import FillReport, load_weights, plan_import, read_model_names
from torchtrain.hugging_face.model_config import compare_config, read_overrides
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import MODEL_OUTPUT
from torchtrain.trainer.export import HUGGING_FACE_FOLDER

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "out_hidden_size": SIZES["hidden_size"],
}


def save_multimodal(family: str, folder: Path, *, are_experts_fused: bool = False) -> nn.Module:
    """Let Hugging Face's multimodal class save itself, and lay beside it what only published folders have.

    Args:
        family: As in ``model.name``.
        folder: Where to.
        are_experts_fused: As they are in memory, instead of a tensor for each expert and projection.
    """
    torch.manual_seed(7)
    sizes = {**SIZES, **FAMILIES[family]}
    outer = {"tie_word_embeddings": sizes.get("tie_word_embeddings", False)}
    config = AutoConfig.for_model(family, text_config=sizes, vision_config=VISION, **outer)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.save_pretrained(folder)
    if are_experts_fused:
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    add_tensor(folder, "mtp.fc.weight")
    return model


def add_tensor(folder: Path, name: str) -> None:
    rewrite(folder, lambda tensors: {**tensors, name: torch.zeros(3, 2)})


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def fill(family: str, folder: Path) -> tuple[nn.Module, FillReport]:
    """Read a folder into our model on this device."""
    opened, spec = open_folder(folder), load_spec(family)
    known = vars(resolve_architecture(family, "debug", {}))
    architecture = resolve_architecture(family, "debug", read_overrides(opened.config, spec.hugging_face.config, known))
    comparison = compare_config(
        opened.config, architecture, spec.hugging_face.config, overridden=(), where="config.json"
    )
    assert comparison.faults == ()
    model = spec.build(architecture)
    report = plan_import(read_model_names(model), opened.tensors, spec.hugging_face.weights)
    if report.is_complete:
        with SliceReader(opened) as reader:
            load_weights(model, report, reader)
    return model, report


@pytest.mark.parametrize(
    ("family", "are_experts_fused"), [("qwen3_5", False), ("qwen3_5_moe", False), ("qwen3_5_moe", True)]
)
def test_the_text_side_is_read_and_the_other_parts_are_named_as_unused(
    tmp_path: Path, family: str, are_experts_fused: bool
) -> None:
    theirs = save_multimodal(family, tmp_path, are_experts_fused=are_experts_fused)
    names = stored_tensors(tmp_path).keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) == are_experts_fused
    assert all(name.startswith(("model.language_model.", "model.visual.", "mtp.", "lm_head.")) for name in names)
    model, report = fill(family, tmp_path)
    assert report.is_complete, report
    assert set(report.ignored) == {name for name in names if name.startswith(("model.visual.", "mtp."))}
    assert "mtp.fc.weight" in report.ignored
    assert len(report.ignored) > 10
    with torch.no_grad():
        assert relative_error(model(fixed_tokens(SIZES["vocab_size"])), logits_of(theirs)) <= MODEL_OUTPUT


@pytest.mark.parametrize("name", ["model.language_model.layers.0.extra.weight", "visual.patch_embed.proj.weight"])
def test_a_tensor_of_no_named_part_is_still_refused(tmp_path: Path, name: str) -> None:
    save_multimodal("qwen3_5", tmp_path)
    add_tensor(tmp_path, name)
    _, report = fill("qwen3_5", tmp_path)
    assert report.unused == (name,)


def test_what_is_missing_is_named_as_the_folder_names_it(tmp_path: Path) -> None:
    save_multimodal("qwen3_5_moe", tmp_path)
    gone = ("layers.1.linear_attn.A_log", "layers.0.mlp.experts.3.up_proj.weight")
    rewrite(tmp_path, lambda tensors: {name: x for name, x in tensors.items() if not name.endswith(gone)})
    _, report = fill("qwen3_5_moe", tmp_path)
    assert report.missing == {
        "layers.1.linear_attn.A_log": (f"model.language_model.{gone[0]}",),
        "layers.0.mlp.experts.up_proj": (f"model.language_model.{gone[1]}",),
    }


def test_what_a_run_exports_of_one_is_a_text_model_with_the_same_logits(tmp_path: Path) -> None:
    theirs = save_multimodal("qwen3_5_moe", tmp_path / "in")
    overrides = (*job_overrides("qwen3_5_moe", tmp_path / "in"), "fsdp_config.dp_shard_size=2")
    travels = run_ranks(travel, 2, overrides, tmp_path / "out")
    exported = tmp_path / "out" / HUGGING_FACE_FOLDER
    before, after = stored_tensors(tmp_path / "in"), stored_tensors(exported)
    assert not any("language_model" in name for name in after)
    assert all(torch.equal(tensor, before[told]) for told, tensor in before.items() if told == "lm_head.weight")
    assert all(one.bytes_read == one.bytes_owned for one in travels)
    assert torch.equal(logits_of(load_model(exported)), logits_of(theirs))
