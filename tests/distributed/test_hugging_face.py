"""Hugging Face checkpoints through real ranks: what goes in comes out bit for bit, and each rank reads its share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.hugging_face_runs import travel
from tests.hugging_face_models import SIZES, job_overrides, load_model, logits_of, save_model, stored_tensors
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import MODEL_OUTPUT
from torchtrain.trainer.export import HUGGING_FACE_FOLDER

FSDP = ("fsdp_config.dp_shard_size=2", "accelerator.tp_size=1")
FSDP4 = ("fsdp_config.dp_shard_size=4",)
FSDP_TP = ("fsdp_config.dp_shard_size=2", "accelerator.tp_size=2")
FSDP_TP_SP = (*FSDP_TP, "accelerator.sequence_parallel=true")
HSDP = ("fsdp_config.dp_shard_size=2",)  # on 4 ranks, two replicas
PP_FSDP = ("fsdp_config.dp_shard_size=2", "accelerator.pp_size=2")
EP_EDP = ("fsdp_config.dp_shard_size=4", "accelerator.ep_size=2", "fsdp_config.edp_shard_size=2")
FSDPTURBO = (
    "fsdp_config.dp_shard_size=4",
    "dist_config={name: fsdpturbo, ep_size: 2, fsdp_implementation: custom}",
)
EP_TP = ("fsdp_config.dp_shard_size=2", "accelerator.tp_size=2", "accelerator.ep_size=2")

ROUTES = [
    ("llama", 1, ()),
    ("llama", 4, FSDP_TP),
    ("llama_untied", 4, PP_FSDP),
    ("qwen2", 1, ()),
    ("qwen2", 4, FSDP_TP),
    ("qwen3", 4, FSDP_TP_SP),
    ("qwen3_moe", 1, ("model.init_on_meta=false",)),
    ("qwen3_moe", 4, EP_EDP),
    ("qwen3_moe", 4, EP_TP),
    ("qwen3_moe", 4, FSDPTURBO),
    ("qwen3_moe", 4, PP_FSDP),
    ("qwen3_5", 1, ()),
    ("qwen3_5", 4, FSDP4),
    ("qwen3_5_moe", 1, ()),
    ("qwen3_5_moe", 4, EP_EDP),
    ("qwen3_5_moe", 4, PP_FSDP),
]


@pytest.mark.parametrize(("kind", "world_size", "topology"), ROUTES)
def test_what_is_imported_is_exported_bit_for_bit(
    tmp_path: Path, kind: str, world_size: int, topology: tuple[str, ...]
) -> None:
    original = save_model(kind, tmp_path / "in", max_shard_size="20KB")
    overrides = (*job_overrides(kind, tmp_path / "in"), "checkpoint.export_max_file_gb=4e-5", *topology)
    is_one_rank = world_size == 1
    travels = run_ranks(travel, world_size, overrides, tmp_path / "out", wants_logits=is_one_rank)
    exported = tmp_path / "out" / HUGGING_FACE_FOLDER
    before, after = stored_tensors(tmp_path / "in"), stored_tensors(exported)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len(list(exported.glob("*.safetensors"))) > 1
    for one in travels:
        assert one.bytes_read == one.bytes_owned
        # No more than one tensor read is in memory beside the model, and never one that is larger than a shard.
        assert one.most_alive == 1
        assert one.largest_read <= one.largest_owned
    expected = logits_of(original)
    assert torch.equal(logits_of(load_model(exported)), expected)
    if is_one_rank:
        # Ours compute the same function of them: rows of queries and keys are in the order that our rotation expects.
        assert relative_error(travels[0].logits, expected) <= MODEL_OUTPUT


@pytest.mark.parametrize(
    ("kind", "topology"),
    [("qwen3", FSDP4), ("qwen3", FSDP_TP), ("qwen3_moe", EP_EDP)],
    ids=["fsdp4", "fsdp2_tp2", "ep2_edp2"],
)
def test_four_ranks_read_their_share_and_what_they_all_hold(
    tmp_path: Path, kind: str, topology: tuple[str, ...]
) -> None:
    even = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "head_dim": 8}
    experts = {"num_experts": 4, "moe_intermediate_size": 16} if kind == "qwen3_moe" else {}
    save_model(kind, tmp_path / "in", **even, **experts)
    total = sum(tensor.nbytes for tensor in stored_tensors(tmp_path / "in").values())
    travels = run_ranks(travel, 4, (*job_overrides(kind, tmp_path / "in"), *topology), tmp_path / "out")
    # Norms are whole on both ranks of the tp axis, which is half of them more than a quarter.
    norms = 4 * (SIZES["num_hidden_layers"] * 2 * (even["head_dim"] + even["hidden_size"]) + even["hidden_size"])
    replicated = norms // 4 if topology is FSDP_TP else 0
    assert all(one.bytes_read <= 1.1 * total / 4 + replicated for one in travels)
    assert sum(one.bytes_read for one in travels) >= total


def test_replicas_write_once_and_main_parameters_start_from_what_is_loaded(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "in")
    before = stored_tensors(tmp_path / "in")
    overrides = (
        *job_overrides("llama", tmp_path / "in"),
        *HSDP,
        "model.init_dtype=bfloat16",
        "optimizer.fp32_main_params=true",
        "fsdp_config.mix_precision.fp32_main_grad=true",
        "fsdp_config.mix_precision.reduce_dtype=float32",
        "checkpoint.export_dtype=bfloat16",
        "checkpoint.export_max_file_gb=null",
    )
    travels = run_ranks(travel, 4, overrides, tmp_path / "out")
    assert all(one.are_mains_the_weights for one in travels)
    exported = tmp_path / "out" / HUGGING_FACE_FOLDER
    assert [file.name for file in exported.glob("*.safetensors")] == ["model.safetensors"]
    after = stored_tensors(exported)
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)


def test_a_file_that_breaks_between_check_and_load_stops_every_rank_with_its_name(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "in")
    overrides = job_overrides("llama", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(AssertionError, match=r"(?s)CheckpointError: .*model\.safetensors = .*cut short"):
        run_ranks(travel, 2, (*overrides, *FSDP), tmp_path / "out")
