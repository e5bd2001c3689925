"""The dense Qwen3 under tensor, context and pipeline parallelism against one rank: what its q/k norms must survive."""

from __future__ import annotations

import pytest

from tests.parity.harness import Outcome, merge_stages, one_rank, train_on_this_rank
from tests.parity.test_topologies import check
from torchtrain.testing.ranks import run_ranks

# Heads that are no quotient of the hidden size, two to a key/value head.
FAMILY = (
    "model.name=qwen3",
    "model.overrides={vocab_size: 101, hidden_size: 36, intermediate_size: 38, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 10, tie_word_embeddings: false}",
)
CASES = {
    "tp2_sp": ("accelerator.tp_size=2", "accelerator.sequence_parallel=true", "training.micro_batch_size=8"),
    "cp2": ("accelerator.cp_size=2", "fsdp_config.dp_shard_size=2", "training.micro_batch_size=8"),
    "pp2": ("accelerator.pp_size=2", "training.micro_batch_size=2"),
}


def train_each() -> dict[str, Outcome]:
    return {name: train_on_this_rank((*FAMILY, *overrides)) for name, overrides in CASES.items()}


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Outcome]]:
    """By rank, of all cases in one start of the ranks."""
    return run_ranks(train_each, 2)


@pytest.mark.parametrize("name", CASES)
def test_topology_equals_one_rank(name: str, outcomes: list[dict[str, Outcome]]) -> None:
    of_ranks = [by_name[name] for by_name in outcomes]
    check(merge_stages(of_ranks), one_rank(*FAMILY, "training.micro_batch_size=8"))
