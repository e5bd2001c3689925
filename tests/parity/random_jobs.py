"""Draws jobs: sizes, modes, batches, packing and switches, whatever the generator says.

A draw need not be legal. The rules of the job check decide that, and each side has its test: what they let through
equals one rank, and what they refuse ends with exit code 2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import get_args

from torchtrain.config.parallel import CpMode, PpSchedule
from torchtrain.errors import TorchtrainError
from torchtrain.train import check_job

BASE = (
    "--model.preset=debug",
    "--dataset.sources=[{path: unused}]",
    "--training.steps=3",
    "--optimizer.fused=false",
    "--accelerator.device=cpu",
)


@dataclass(frozen=True)
class DrawnJob:
    """One draw."""

    world_size: int
    numbers: tuple[str, ...]
    """Overrides that one rank must have too: they are what is trained."""
    technique: tuple[str, ...]
    """Overrides that must not change a number."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.numbers, *self.technique)


def draw_job(seed: int) -> DrawnJob:
    """Draw from a seed; the same job every time."""
    rng = random.Random(seed)
    pick = rng.choice
    tp, cp, pp = pick((1, 2)), pick((1, 2)), pick((1, 2))
    dp = pick((1, 2, 3) if tp * cp * pp < 4 else (1, 1, 2))
    domain = dp * cp
    micro, share = pick((1, 2)), pick((2, 4, 4, 6))
    return DrawnJob(
        world_size=tp * cp * pp * dp,
        numbers=_draw_numbers(rng, global_batch_size=share * dp),
        technique=(
            f"accelerator.tp_size={tp}",
            f"accelerator.cp_size={cp}",
            f"accelerator.pp_size={pp}",
            f"accelerator.sequence_parallel={pick(('true', 'false'))}",
            f"accelerator.loss_parallel={pick(('true', 'false'))}",
            f"accelerator.cp_mode={pick(get_args(CpMode))}",
            f"accelerator.pp_schedule={pick(get_args(PpSchedule))}",
            f"training.micro_batch_size={micro}",
            f"training.loss_chunk_size={pick(('null', '7', '16'))}",
            f"fsdp_config.dp_shard_size={pick([size for size in range(1, domain + 1) if domain % size == 0])}",
            f"fsdp_config.comm_fusion={pick(('true', 'false'))}",
            f"fsdp_config.comm_fusion_zero_copy={pick(('null', 'false'))}",
            f"fsdp_config.reshard_after_forward={pick(('true', 'false'))}",
            f"fsdp_config.reshard_after_backward={pick(('true', 'false'))}",
            f"fsdp_config.requires_grad_sync={pick(('true', 'false'))}",
            f"fsdp_config.forward_prefetch_depth={pick((0, 1, 3))}",
            f"fsdp_config.backward_prefetch_depth={pick((0, 1, 3))}",
            f"fsdp_config.replicate_params={pick(('[]', '[]', '[layers.0.mlp.up_proj.weight]'))}",
            f"fsdp_config.enable_offload={pick(('false', 'false', 'true'))}",
            f"activation_checkpoint.mode={pick(('none', 'full', 'selective_op', 'every_nth_block'))}",
            f"model.init_on_meta={pick(('true', 'false'))}",
        ),
    )


def _draw_numbers(rng: random.Random, *, global_batch_size: int) -> tuple[str, ...]:
    pick = rng.choice
    heads, kv_heads = pick(((4, 1), (4, 2), (4, 4), (3, 1), (8, 2), (6, 3)))
    sizes = {
        "vocab_size": pick((101, 104)),
        "hidden_size": heads * pick((5, 8)),
        "intermediate_size": pick((36, 37, 40)),
        "num_hidden_layers": pick((2, 3, 4, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": pick((6, 8, 10)),
        "attention_bias": pick(("true", "false")),
        "tie_word_embeddings": pick(("true", "false")),
    }
    target = pick(("torch.optim.AdamW", "torch.optim.AdamW", "torchtrain.optim.muon.Muon"))
    return (
        f"model.overrides={{{', '.join(f'{name}: {value}' for name, value in sizes.items())}}}",
        f"training.seq_len={pick((16, 16, 24, 30))}",
        f"training.global_batch_size={global_batch_size}",
        f"training.max_grad_norm={pick(('0.5', '0.5', 'null'))}",
        f"dataset.document_aware={pick(('true', 'false'))}",
        f"optimizer._target_={target}",
        "optimizer.lr=1e-2",
        # AdamW divides by the root of a moment. Where a gradient is hardly more than rounding, as a key bias's is, it
        # would make a step of it; what is held against one rank here is gradients.
        "optimizer.eps=1e-3",
    )


def is_legal(job: DrawnJob) -> bool:
    """Ask the rules of the job check."""
    try:
        check_job([*BASE, *(f"--{override}" for override in job.overrides)], job.world_size)
    except TorchtrainError:
        return False
    return True


def drawn_job(index: int, *, legal: bool) -> DrawnJob:
    """The draw of one kind that has this number, among those of two to eight ranks."""
    return draw_job(_seed_of(index, legal=legal))


@cache
def _seed_of(index: int, *, legal: bool) -> int:
    seed = _seed_of(index - 1, legal=legal) + 1 if index else 0
    while not (2 <= (job := draw_job(seed)).world_size <= 8 and is_legal(job) == legal):
        seed += 1
    return seed
