"""Qwen3.5 with experts under every technique it can do, packed, against one rank: losses, norms, gradients, weights.

Its dense sibling differs in its feed-forward layers alone, which the families with attention in all layers have too.
"""

from __future__ import annotations

import pytest

from models.registry import unsupported_techniques
from tests.parity.harness import SharedTopologies, one_rank, run_topology
from tests.parity.test_topologies import check
from torchtrain.distributed.legality import Technique
from torchtrain.errors import ConfigError
from torchtrain.train import check_job

# Several chunks to a sequence, an odd one at its end; documents end inside of them.
FAMILY = (
    "model.name=qwen3_5_moe",
    "model.overrides={vocab_size: 101, hidden_size: 36, num_hidden_layers: 2, full_attention_interval: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, partial_rotary_factor: 0.5, "
    "mrope_section: [2, 1, 1], linear_num_key_heads: 2, linear_num_value_heads: 4, linear_key_head_dim: 10, "
    "linear_value_head_dim: 9, moe_intermediate_size: 20, shared_expert_intermediate_size: 22, num_experts: 4, "
    "num_experts_per_tok: 2, router_aux_loss_coef: 0.1}",
    "training.seq_len=40",
    "kernel_config.chunk_size=16",
    # What few tokens move has gradients near AdamW's default epsilon, where its update is their rounding.
    "optimizer.eps=1e-4",
)
WHOLE = "training.micro_batch_size=8"
PLAIN = "dataset.document_aware=false"
SHARD_2, SHARD_4 = "fsdp_config.dp_shard_size=2", "fsdp_config.dp_shard_size=4"
ULYSSES = ("accelerator.cp_size=2", "accelerator.cp_mode=ulysses")

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp2": (2, (SHARD_2, "training.micro_batch_size=4")),
    "fsdp2_plain": (2, (SHARD_2, "training.micro_batch_size=4", PLAIN)),
    "ep2_edp2": (
        4,
        (
            SHARD_4,
            "accelerator.ep_size=2",
            "fsdp_config.edp_shard_size=2",
            "training.micro_batch_size=1",
            "activation_checkpoint.mode=full",
        ),
    ),
    "pp2": (2, ("accelerator.pp_size=2", "training.micro_batch_size=2")),
    "recompute_full": (1, (WHOLE, "activation_checkpoint.mode=full")),
    "recompute_selective": (1, (WHOLE, "activation_checkpoint.mode=selective_op")),
    "cp2_ulysses": (2, (*ULYSSES, WHOLE)),
    "cp2_ulysses_ep2_recompute_plain": (
        4,
        (
            *ULYSSES,
            SHARD_4,
            "accelerator.ep_size=2",
            "training.micro_batch_size=4",
            "activation_checkpoint.mode=full",
            PLAIN,
        ),
    ),
    "compiled": (1, (WHOLE, "compile.enabled=true", "compile.backend=aot_eager")),
    "fsdpturbo_ep2_cp2": (
        4,
        (*ULYSSES, SHARD_4, "training.micro_batch_size=4", "dist_config.name=fsdpturbo", "dist_config.ep_size=2"),
    ),
    "chunks_of_64": (1, (WHOLE, "kernel_config.chunk_size=64")),
}


RUNS = SharedTopologies({name: (size, (*FAMILY, *overrides)) for name, (size, overrides) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_topology_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    _, overrides = CASES[name]
    plain = (PLAIN,) if PLAIN in overrides else ()
    check(RUNS.run(name, chosen_rows), one_rank(*FAMILY, WHOLE, *plain))


def test_the_dense_sibling_equals_one_rank_too() -> None:
    sizes = FAMILY[1].split(", moe_intermediate_size")[0] + ", intermediate_size: 38}"
    dense = ("model.name=qwen3_5", sizes, *FAMILY[2:])
    topology = (*ULYSSES, SHARD_2, "training.micro_batch_size=2", "activation_checkpoint.mode=full")
    check(run_topology(4, *dense, *topology), one_rank(*dense, WHOLE))


REFUSED: dict[Technique, tuple[int, tuple[str, ...]]] = {
    "tensor parallel": (2, ("--accelerator.tp_size=2",)),
    "context parallel, allgather": (2, ("--accelerator.cp_size=2", "--accelerator.cp_mode=allgather")),
    "context parallel, ring": (2, ("--accelerator.cp_size=2", "--accelerator.cp_mode=ring")),
}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("technique", REFUSED)
def test_what_a_delta_net_cannot_do_is_refused_by_name(family: str, technique: Technique) -> None:
    world_size, overrides = REFUSED[technique]
    with pytest.raises(ConfigError) as caught:
        check_job([f"train_configs/{family}/debug.yaml", *overrides], world_size)
    assert any(f"{technique} is not possible with {family}:" in fault.rule for fault in caught.value.faults)
    assert unsupported_techniques(family).keys() >= REFUSED.keys()


def test_ulysses_needs_key_heads_for_every_rank() -> None:
    job = ["train_configs/qwen3_5_moe/debug.yaml", "--accelerator.cp_size=4", "--accelerator.cp_mode=ulysses"]
    with pytest.raises(ConfigError) as caught:
        check_job(job, 4)
    assert any("linear_num_key_heads = 2" in fault.rule for fault in caught.value.faults)
