"""Draws jobs: sizes, modes, batches, packing and switches, whatever the generator says.

A draw need not be legal. The rules of the job check decide that, and each side has its test: what they let through
equals one rank, and what they refuse ends with exit code 2.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import get_args

from torchtrain.config.parallel import CpMode, EpDispatcher, PpSchedule
from torchtrain.distributed.pipeline_parallel.stage_plan import num_stages
from torchtrain.errors import TorchtrainError
from torchtrain.train import check_job

BASE = (
    "--model.preset=debug",
    "--dataset.sources=[{path: unused}]",
    "--training.steps=3",
    "--optimizer.fused=true",
    "--accelerator.device=cpu",
)

LOW_PRECISION = "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}"


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

    @property
    def is_low_precision(self) -> bool:
        """Whether it computes in bf16, which one fp32 rank can only be near to."""
        return LOW_PRECISION in self.technique


def draw_job(seed: int) -> DrawnJob:
    """Draw from a seed; the same job every time."""
    rng = random.Random(seed)
    pick = rng.choice
    tp, cp, pp = pick((1, 2)), pick((1, 2)), pick((1, 2))
    dp = pick((1, 2, 3) if tp * cp * pp < 4 else (1, 1, 2))
    domain = dp * cp
    micro, share = pick((1, 1, 2)), pick((2, 4, 4, 6))
    family, stage_size = pick(("llama", "qwen3_moe")), tp * domain
    has_experts = family == "qwen3_moe"
    ep = pick(_divisors(stage_size)) if has_experts else 1
    whole = "[layers.0.self_attn.q_proj.weight]" if has_experts else "[layers.0.mlp.up_proj.weight]"
    num_layers, numbers = _draw_numbers(rng, family, global_batch_size=share * dp)
    return DrawnJob(
        world_size=pp * stage_size,
        numbers=numbers,
        technique=(
            f"accelerator.ep_size={ep}",
            f"fsdp_config.edp_shard_size={pick(_divisors(stage_size // ep))}",
            f"dist_config.ep_dispatcher={pick(get_args(EpDispatcher)) if has_experts else 'eager'}",
            f"activation_checkpoint.recompute_exchange={pick(('true', 'false'))}",
            f"accelerator.tp_size={tp}",
            f"accelerator.cp_size={cp}",
            f"accelerator.pp_size={pp}",
            f"accelerator.sequence_parallel={pick(('true', 'false'))}",
            f"accelerator.loss_parallel={pick(('true', 'false'))}",
            f"accelerator.cp_mode={pick(get_args(CpMode))}",
            f"accelerator.pp_schedule={(schedule := pick(get_args(PpSchedule)))}",
            f"training.micro_batch_size={micro}",
            f"training.loss_chunk_size={pick(('null', '7', '16'))}",
            f"fsdp_config.dp_shard_size={pick(_divisors(domain))}",
            f"fsdp_config.comm_fusion={pick(('true', 'false'))}",
            f"fsdp_config.comm_fusion_zero_copy={pick(('null', 'false'))}",
            f"fsdp_config.reshard_after_forward={pick(('true', 'false'))}",
            f"fsdp_config.reshard_after_backward={pick(('true', 'false'))}",
            f"fsdp_config.requires_grad_sync={pick(('true', 'false'))}",
            f"fsdp_config.forward_prefetch_depth={pick((0, 1, 3))}",
            f"fsdp_config.backward_prefetch_depth={pick((0, 1, 3))}",
            f"fsdp_config.replicate_params={pick(('[]', '[]', whole))}",
            f"fsdp_config.enable_offload={pick(('false', 'false', 'true'))}",
            f"activation_checkpoint.mode={pick(('none', 'full', 'selective_op', 'every_nth_block'))}",
            f"model.init_on_meta={pick(('true', 'false'))}",
            f"accelerator.pp_micro_batch_size={pick(('null', 'null', '1', '2')) if pp > 1 else 'null'}",
            f"accelerator.pp_layers={_draw_layer_list(rng, num_layers, schedule, pp)}",
            *pick(((), (), (LOW_PRECISION,))),
        ),
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _draw_layer_list(rng: random.Random, num_layers: int, schedule: PpSchedule, pp_size: int) -> str:
    """No list, one that adds up where there are layers enough, or one of a layer a stage."""
    kind, stages = rng.choice(("none", "none", "cut", "cut", "ones")), num_stages(schedule, pp_size)
    if kind == "none" or pp_size == 1:
        return "null"
    if kind == "ones" or num_layers < stages:
        return str([1] * stages)
    cuts = sorted(rng.sample(range(1, num_layers), stages - 1))
    return str([stop - start for start, stop in pairwise((0, *cuts, num_layers))])


def _draw_numbers(rng: random.Random, family: str, *, global_batch_size: int) -> tuple[int, tuple[str, ...]]:
    """The number of layers, and all overrides."""
    pick = rng.choice
    heads, kv_heads = pick(((4, 1), (4, 2), (4, 4), (3, 1), (8, 2), (6, 3)))
    sizes = {
        "vocab_size": pick((101, 104)),
        "hidden_size": heads * pick((5, 8)),
        "intermediate_size": pick((36, 36, 37, 40, 40)),
        "num_hidden_layers": pick((2, 3, 4, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": pick((6, 8, 10)),
        "attention_bias": pick(("true", "false")),
        "tie_word_embeddings": pick(("true", "false", "false")),
    }
    if family == "qwen3_moe":
        sizes |= {
            "moe_intermediate_size": pick((10, 12)),
            "shared_expert_intermediate_size": pick((0, 12)),
            "num_experts": pick((4, 6, 8)),
            "num_experts_per_tok": pick((1, 2, 4)),
            "norm_topk_prob": pick(("true", "false")),
            "mlp_only_layers": pick(("[]", "[0]")),
            # Scope sequence: what goes forward together differs between one rank and several.
            "router_aux_loss_coef": pick((0.0, 0.05)),
            "router_z_loss_coef": pick((0.0, 0.01)),
            "router_bias_update_rate": pick((0.0, 0.01)),
        }
    target = pick(("torch.optim.AdamW", "torch.optim.AdamW", "torchtrain.optim.muon.Muon"))
    return int(sizes["num_hidden_layers"]), (
        f"model.name={family}",
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
