"""Context parallelism against one rank: every mode, alone and with FSDP, accumulation and packing; and broken laws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.parity.harness import Outcome, SharedTopologies, one_rank, run_topology, train_on_this_rank
from tests.parity.test_topologies import ACCUMULATE, SHARD_2, check
from torchtrain.config.parallel import CpMode
from torchtrain.data.batch import Batch
from torchtrain.distributed.context_parallel import ring, tail_attention
from torchtrain.distributed.context_parallel.block_attention import Visible
from torchtrain.distributed.fsdp2 import manager
from torchtrain.testing.compare import relative_error
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.tolerances import BF16_SCALAR
from torchtrain.trainer.sequence_shard import SequenceShard

MODES: tuple[CpMode, ...] = ("ulysses", "allgather", "ring")
# Four query heads to one key/value head; the rest as odd as in the table.
HEADS = (
    "model.overrides={vocab_size: 101, hidden_size: 36, intermediate_size: 37, num_hidden_layers: 2, "
    "num_attention_heads: 4, num_key_value_heads: 1, head_dim: 10, tie_word_embeddings: false}"
)
TP = HEADS.replace("num_key_value_heads: 1", "num_key_value_heads: 2").replace("size: 37", "size: 38")
PLAIN = "dataset.document_aware=false"
WHOLE_BATCH = "training.micro_batch_size=8"
HALF_BATCH = "training.micro_batch_size=4"


def cp(size: int, mode: CpMode) -> tuple[str, str]:
    return f"accelerator.cp_size={size}", f"accelerator.cp_mode={mode}"


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    **{f"cp2_{mode}": (2, (*cp(2, mode), WHOLE_BATCH)) for mode in MODES},
    **{f"cp2_{mode}_plain": (2, (*cp(2, mode), WHOLE_BATCH, SHARD_2, PLAIN)) for mode in MODES},
    **{f"fsdp2_cp2_{mode}": (4, (*cp(2, mode), HALF_BATCH, "fsdp_config.dp_shard_size=4")) for mode in MODES},
    "replicate2_cp2_shard2_accumulated": (4, (*cp(2, "ring"), ACCUMULATE, SHARD_2)),
    "cp2_accumulated": (2, (*cp(2, "allgather"), ACCUMULATE, SHARD_2, "fsdp_config.requires_grad_sync=false")),
    "cp4_ring": (4, (*cp(4, "ring"), WHOLE_BATCH, SHARD_2)),
    "cp4_ring_plain": (4, (*cp(4, "ring"), WHOLE_BATCH, PLAIN)),
    "pp2_cp2_ring": (4, (*cp(2, "ring"), "accelerator.pp_size=2", "training.micro_batch_size=2")),
    "cp2_ring_selective_recompute": (2, (*cp(2, "ring"), WHOLE_BATCH, "activation_checkpoint.mode=selective_op")),
    "cp2_ulysses_full_recompute": (2, (*cp(2, "ulysses"), WHOLE_BATCH, "activation_checkpoint.mode=full")),
    "cp2_allgather_compiled": (
        2,
        (*cp(2, "allgather"), WHOLE_BATCH, "compile.enabled=true", "compile.backend=aot_eager"),
    ),
}


def reference(overrides: tuple[str, ...]) -> Outcome:
    return one_rank(HEADS, WHOLE_BATCH, *([PLAIN] if PLAIN in overrides else []))


RUNS = SharedTopologies({name: (size, (HEADS, *overrides)) for name, (size, overrides) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_topology_equals_one_rank(name: str, chosen_rows: list[str]) -> None:
    _, overrides = CASES[name]
    check(RUNS.run(name, chosen_rows), reference(overrides))


@pytest.mark.parametrize(("mode", "sequence_parallel"), [("ulysses", True), ("allgather", False), ("ring", True)])
def test_tensor_times_context_parallel_equals_one_rank(mode: CpMode, sequence_parallel: bool) -> None:
    sequence = f"accelerator.sequence_parallel={str(sequence_parallel).lower()}"
    outcome = run_topology(4, TP, *cp(2, mode), "accelerator.tp_size=2", sequence, WHOLE_BATCH, SHARD_2)
    check(outcome, one_rank(TP, WHOLE_BATCH))


@pytest.mark.parametrize("mode", MODES)
def test_bf16_follows_fp32(mode: CpMode) -> None:
    low = run_topology(
        2,
        HEADS,
        *cp(2, mode),
        WHOLE_BATCH,
        "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}",
    )
    for ours, theirs in zip(low.losses, one_rank(HEADS, WHOLE_BATCH).losses, strict=True):
        assert relative_error(ours, theirs) <= BF16_SCALAR


def forget_the_offset(overrides: tuple[str, ...]) -> Outcome:
    """Mask: local queries masked as if they were the first of the sequence."""

    def blocks(
        q_BNTH: torch.Tensor, k_BKEH: torch.Tensor, document_ids_BE: torch.Tensor | None
    ) -> Iterator[tuple[slice, Visible]]:
        mask_TE = torch.ones(q_BNTH.shape[2], k_BKEH.shape[2], dtype=torch.bool).tril()
        yield slice(None), Visible(mask_TE[None, None], is_causal=False)

    tail_attention._blocks = blocks
    return train_on_this_rank(overrides)


def mix_documents(overrides: tuple[str, ...]) -> Outcome:
    """Mask: a ring that compares no documents."""
    ring.RingCore.build_mask = lambda self, document_ids_BT: None
    return train_on_this_rank(overrides)


def drop_the_last_hop(overrides: tuple[str, ...]) -> Outcome:
    """Ring: the gradients that others computed for this rank's keys and values never come home."""

    def bring_home(own_2BKTH: torch.Tensor, passing: ring.Passing) -> torch.Tensor:
        passing.wait()
        return own_2BKTH

    ring._bring_home = bring_home
    return train_on_this_rank(overrides)


def never_reduce_over_cp(overrides: tuple[str, ...]) -> Outcome:
    """Reduce axis: every cp rank keeps the gradient of its own tokens."""
    manager.FSDP2Manager.parallelize = lambda self, model, plan: model
    return train_on_this_rank(overrides)


def count_positions_from_the_share(overrides: tuple[str, ...]) -> Outcome:
    """Positions: counted within this rank's tokens."""
    original = SequenceShard.take

    def take(self: SequenceShard, batch: Batch) -> Batch:
        local = original(self, batch)
        places_T = torch.arange(local.positions_BT.shape[1])
        return replace(local, positions_BT=places_T.expand_as(local.positions_BT))

    SequenceShard.take = take
    return train_on_this_rank(overrides)


MUTATIONS: dict[Callable[[tuple[str, ...]], Outcome], tuple[int, tuple[str, ...]]] = {
    forget_the_offset: CASES["cp2_allgather_plain"],
    mix_documents: CASES["cp2_ring"],
    drop_the_last_hop: CASES["cp2_ring"],
    never_reduce_over_cp: CASES["cp2_ulysses"],
    count_positions_from_the_share: CASES["cp2_allgather_plain"],
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_broken_law_turns_the_table_red(mutation: Callable[[tuple[str, ...]], Outcome]) -> None:
    world_size, overrides = MUTATIONS[mutation]
    outcome = run_ranks(mutation, world_size, (HEADS, *overrides))[0]
    with pytest.raises(AssertionError):
        check(outcome, reference(overrides))
