"""Model and techniques together: what a family cannot do, and every condition that sizes must meet."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from models.registry import resolve_architecture, unsupported_techniques
from torchtrain.config.load import read_job
from torchtrain.distributed.legality import find_legality_faults, find_model_warnings, techniques_in_use
from torchtrain.errors import Fault


def faults_of(*overrides: str, **unsupported: str) -> list[Fault]:
    job = read_job(None, list(overrides)).job
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    named = {name.replace("_", " "): reason for name, reason in unsupported.items()}
    return find_legality_faults(architecture, job, family="llama", unsupported=named)


def test_what_a_family_cannot_do_is_refused_by_name_with_the_reason() -> None:
    (fault,) = faults_of("accelerator.pp_size=2", pipeline_parallel="its layers are one")
    assert fault.path == "accelerator.pp_size"
    assert "pipeline parallel is not possible with llama: its layers are one" in fault.rule


def test_delta_nets_outside_of_ulysses_are_refused_with_the_two_ways_out() -> None:
    job = read_job(None, ["accelerator={cp_size: 2, cp_mode: ring}", "model.name=qwen3_5_moe"]).job
    architecture = resolve_architecture("qwen3_5_moe", "debug", {})
    unsupported = unsupported_techniques("qwen3_5_moe")
    (fault,) = find_legality_faults(architecture, job, family="qwen3_5_moe", unsupported=unsupported)
    assert fault.fix == "set accelerator.cp_mode: ulysses, or accelerator.cp_size: 1"


def test_a_technique_that_is_not_in_use_is_not_held_against_a_job() -> None:
    assert faults_of(pipeline_parallel="its layers are one") == []


def test_techniques_are_read_off_the_sizes() -> None:
    job = read_job(None, ["accelerator={tp_size: 2, cp_size: 2, cp_mode: ring, sequence_parallel: true}"]).job
    assert list(techniques_in_use(job)) == ["tensor parallel", "sequence parallel", "context parallel, ring"]


HEADS = "model.overrides={num_attention_heads: 12, num_key_value_heads: 6, head_dim: 8}"


def context_parallel_faults(mode: str, cp_size: int, *overrides: str) -> list[Fault]:
    return faults_of(f"accelerator.cp_mode={mode}", f"accelerator.cp_size={cp_size}", HEADS, *overrides)


@pytest.mark.parametrize(
    ("mode", "multiple", "overrides"),
    [
        ("ulysses", 2, ()),
        ("allgather", 2, ()),
        ("ring", 4, ()),
        ("ring", 8, ("accelerator.tp_size=2", "accelerator.sequence_parallel=true")),
    ],
)
def test_length_that_context_parallel_ranks_cannot_share_names_the_nearest_ones(
    mode: str, multiple: int, overrides: tuple[str, ...]
) -> None:
    (fault,) = [
        fault for fault in context_parallel_faults(mode, 2, *overrides, "training.seq_len=101") if mode in fault.rule
    ]
    assert fault.path == "training.seq_len"
    assert f"= {multiple} " in fault.rule
    below = 101 // multiple * multiple
    assert fault.fix == f"use {below} or {below + multiple}"
    assert context_parallel_faults(mode, 2, *overrides, f"training.seq_len={below}") == []


@pytest.mark.parametrize(
    ("cp_size", "overrides", "name", "fix"),
    [
        (5, (), "num_attention_heads = 12 ", "use 3 or 6, or "),
        (4, (), "num_key_value_heads = 6 ", "use 3 or 6, or "),
        (2, ("accelerator.tp_size=2",), "num_key_value_heads = 6 / accelerator.tp_size = 3 ", "use 3, or "),
    ],
)
def test_heads_that_ulysses_cannot_share_are_refused_with_another_size_or_mode(
    cp_size: int, overrides: tuple[str, ...], name: str, fix: str
) -> None:
    length = f"training.seq_len={cp_size * 8}"
    (fault,) = context_parallel_faults("ulysses", cp_size, length, *overrides)
    assert fault.path == "accelerator.cp_size"
    assert f"must divide {name}" in fault.rule
    assert fault.fix.startswith(f"{fix}set accelerator.cp_mode to allgather or ring")
    assert context_parallel_faults("ring", cp_size, length, *overrides) == []


@pytest.mark.parametrize("cp_size", [2, 3, 6, 12])
def test_fewer_key_value_heads_than_ranks_are_legal(cp_size: int) -> None:
    assert context_parallel_faults("ulysses", cp_size, f"training.seq_len={cp_size * 8}") == []


@pytest.mark.parametrize(
    ("overrides", "rule", "fix"),
    [
        ("num_attention_heads: 16, num_key_value_heads: 4", "must divide num_key_value_heads = 4", "use 4"),
        (
            "num_attention_heads: 12, num_key_value_heads: 2",
            "must divide num_attention_heads = 12 and num_key_value_heads = 2",
            "use 2",
        ),
        ("num_key_value_heads: 8, intermediate_size: 36", "must divide intermediate_size = 36", "use 4"),
    ],
)
def test_sizes_that_tensor_parallel_ranks_cannot_share_are_named_with_a_legal_size(
    overrides: str, rule: str, fix: str
) -> None:
    (fault,) = faults_of("accelerator.tp_size=8", f"model.overrides={{{overrides}}}")
    assert (fault.path, fault.rule, fault.fix) == ("accelerator.tp_size", rule, fix)


def test_a_vocabulary_that_leaves_a_rank_nothing_is_refused() -> None:
    sizes = "num_attention_heads: 8, num_key_value_heads: 8, vocab_size: 9"
    (fault,) = faults_of("accelerator.tp_size=8", f"model.overrides={{{sizes}}}")
    assert fault.rule == "must leave every rank a part of vocab_size = 9, in parts of 2"
    assert fault.fix == "use 2"  # 5 would do for the vocabulary, not for the heads; 4 for the heads alone
    assert faults_of("accelerator.tp_size=4", "model.overrides={vocab_size: 101}") == []


def test_uneven_parts_of_a_vocabulary_that_fsdp_cuts_into_rows_nobody_can_place_are_refused() -> None:
    sizes = ("accelerator.tp_size=2", "model.overrides={vocab_size: 50257}")
    (fault,) = faults_of(*sizes, "fsdp_config.dp_shard_size=4")
    assert fault.path == "fsdp_config.dp_shard_size"
    assert "accelerator.tp_size = 2 makes of vocab_size = 50257" in fault.rule
    assert fault.fix == "use 2, or a tp_size that divides vocab_size"
    assert faults_of(*sizes, "fsdp_config.dp_shard_size=2") == []


@pytest.mark.parametrize("tp_size", [2, 3])
@pytest.mark.parametrize("dp_shard_size", [2, 3, 4, 8])
def test_exactly_the_vocabularies_are_refused_whose_rows_dtensor_misplaces(tp_size: int, dp_shard_size: int) -> None:
    others = {"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 6}
    job = read_job(None, [f"accelerator.tp_size={tp_size}", f"fsdp_config.dp_shard_size={dp_shard_size}"]).job
    for vocab_size in range(2 * tp_size * dp_shard_size, 2 * tp_size * dp_shard_size + 30):
        sized = resolve_architecture("llama", "debug", {**others, "vocab_size": vocab_size})
        is_refused = bool(find_legality_faults(sized, job, family="llama", unsupported={}))
        assert is_refused == misplaces_rows(vocab_size, dp_shard_size, tp_size), vocab_size


def misplaces_rows(num_rows: int, dp_shard_size: int, tp_size: int) -> bool:
    """Whether what DTensor says of any rank differs from cutting by tp and then each part by FSDP."""
    parts = torch.arange(num_rows).chunk(tp_size)
    for tp_rank, part in enumerate(parts):
        pieces = part.chunk(dp_shard_size)
        for fsdp_rank in range(dp_shard_size):
            held = pieces[fsdp_rank].tolist() if fsdp_rank < len(pieces) else []
            (count,), (start,) = _compute_local_shape_and_global_offset(
                (num_rows,),
                (dp_shard_size, tp_size),
                [fsdp_rank, tp_rank],
                [_StridedShard(0, split_factor=tp_size), Shard(0)],
            )
            if count != len(held) or (held and start != held[0]):
                return True
    return False


def test_sequence_parallel_refuses_a_length_that_ranks_cannot_share() -> None:
    sharing = ("accelerator.tp_size=4", "accelerator.sequence_parallel=true")
    (fault,) = faults_of(*sharing, "training.seq_len=258")
    assert (fault.path, fault.fix) == ("training.seq_len", "use 256 or 260")
    assert faults_of(*sharing, "training.seq_len=260") == []
    assert faults_of("accelerator.tp_size=4", "training.seq_len=258") == []


def test_chunks_of_logits_that_are_gathered_anyway_are_refused() -> None:
    (fault,) = faults_of("accelerator.tp_size=2", "training.loss_chunk_size=64")
    assert (fault.path, fault.fix) == ("training.loss_chunk_size", "set accelerator.loss_parallel: true")
    assert faults_of("accelerator.tp_size=2", "training.loss_chunk_size=64", "accelerator.loss_parallel=true") == []
    assert faults_of("training.loss_chunk_size=64") == []


def expert_faults(*overrides: str) -> list[Fault]:
    job = read_job(None, list(overrides)).job
    architecture = resolve_architecture("qwen3_moe", "debug", job.model.overrides)
    return find_legality_faults(architecture, job, family="qwen3_moe", unsupported={})


@pytest.mark.parametrize(("ep_size", "fix"), [(3, "use 2 or 4"), (16, "use 8")])
def test_experts_that_ranks_cannot_share_are_refused_with_the_nearest_sizes(ep_size: int, fix: str) -> None:
    (fault,) = expert_faults(f"accelerator.ep_size={ep_size}")
    assert (fault.path, fault.fix) == ("accelerator.ep_size", fix)
    assert "must divide num_experts = 8" in fault.rule
    (fault,) = expert_faults("dist_config.name=fsdpturbo", f"dist_config.ep_size={ep_size}")
    assert (fault.path, fault.fix) == ("dist_config.ep_size", fix)


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_every_divisor_of_the_experts_is_legal(ep_size: int) -> None:
    assert expert_faults(f"accelerator.ep_size={ep_size}") == []


def test_a_shared_expert_that_tensor_parallel_ranks_cannot_share_is_refused() -> None:
    sizes = "model.overrides={shared_expert_intermediate_size: 18, moe_intermediate_size: 9}"
    (fault,) = expert_faults("accelerator.tp_size=4", sizes)
    assert (fault.path, fault.fix) == ("accelerator.tp_size", "use 3 or 6")
    assert expert_faults("accelerator.tp_size=2", sizes) == []


def test_whole_graph_is_refused_for_a_model_with_experts_only() -> None:
    words = ["compile.enabled=true", "compile.fullgraph=true"]
    assert faults_of(*words) == []
    sparse = resolve_architecture("qwen3_moe", "debug", {})
    (fault,) = find_legality_faults(sparse, read_job(None, words).job, family="qwen3_moe", unsupported={})
    assert (fault.path, fault.fix) == ("compile.fullgraph", "set compile.fullgraph: false")
    assert "a model with experts (num_experts = " in fault.rule


@pytest.mark.parametrize(
    ("family", "override", "said"),
    [
        (
            "llama",
            "activation_checkpoint={mode: every_nth_block, every_n_blocks: 99}",
            "activation_checkpoint.every_n_blocks = 99 checkpoints one block only",
        ),
        ("llama", "debug.force_balanced_routing=true", "has no effect: it needs a model with experts"),
        ("qwen3_moe", "debug.force_balanced_routing=true", "useless for training"),
        ("qwen3_moe", "dataset.packing=false", "padding, which is routed like any token"),
        ("llama", "dataset.packing=false", ""),
        ("llama", "activation_checkpoint={mode: every_nth_block, every_n_blocks: 2}", ""),
    ],
)
def test_settings_that_do_nothing_with_the_model_are_warned_about(family: str, override: str, said: str) -> None:
    job = read_job(None, [override]).job
    warnings = find_model_warnings(resolve_architecture(family, "debug", {}), job)
    assert [said in warning for warning in warnings] == ([True] if said else [])
