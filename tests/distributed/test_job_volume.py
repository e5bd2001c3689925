"""What a whole job moves is the sum of its techniques' closed formulas, on every rank, unit, phase and axis."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from models.llama.parallelize import TENSOR_PARALLEL_TABLE
from models.registry import load_spec, resolve_architecture
from tests.distributed.test_comm_trace import Collected, Records, Volumes, collectives
from tests.parity.harness import MODEL, build_train_step, make_global_batch
from tests.shared_ranks import SharedRanks
from torchtrain.config.load import load_job
from torchtrain.distributed.comm_trace import CommTrace
from torchtrain.distributed.job_volume import plan_job_volume
from torchtrain.distributed.meshes import build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.optim.build import build_optimizer
from torchtrain.testing.shares import split_batch
from torchtrain.trainer.run import Run, build_model

# A vocabulary, and norms after tp and FSDP, that do not divide: ranks differ.
ODD = (
    "model.overrides={vocab_size: 101, hidden_size: 36, intermediate_size: 38, num_hidden_layers: 4, "
    "num_attention_heads: 4, num_key_value_heads: 2, head_dim: 8, tie_word_embeddings: false}"
)
TIED = ODD.replace("tie_word_embeddings: false", "tie_word_embeddings: true, attention_bias: true")
TP, CP, PP = "accelerator.tp_size=2", "accelerator.cp_size=2", "accelerator.pp_size=2"
SP, LP = "accelerator.sequence_parallel=true", "accelerator.loss_parallel=true"
SHARD_2 = "fsdp_config.dp_shard_size=2"
FULL, NTH = "activation_checkpoint.mode=full", "activation_checkpoint.mode=every_nth_block"
MAIN = "fsdp_config.mix_precision={fp32_main_grad: true, reduce_dtype: float32}"
LOW = "fsdp_config.mix_precision={param_dtype: bfloat16, reduce_dtype: float32}"
WHOLE = "fsdp_config.replicate_params=[layers.0.mlp.up_proj.weight, '*norm.weight']"


def schedule(name: str) -> str:
    return f"accelerator.pp_schedule={name}"


def mode(name: str) -> str:
    return f"accelerator.cp_mode={name}"


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp_tied_autocast": (2, (TIED, TP, SP, "fsdp_config.mix_precision={param_dtype: bfloat16}")),
    "tp_lp_autocast": (2, (ODD, TP, LP, NTH, "fsdp_config.mix_precision={param_dtype: bfloat16}")),
    "fsdp_tp_sp_whole": (4, (TIED, SHARD_2, TP, SP, LP, WHOLE)),
    "replicate_tp_mains": (
        4,
        (ODD, TP, SP, MAIN, "model.init_dtype=bfloat16", "optimizer.fp32_main_params=true"),
    ),
    "fsdp_tp_cp": (4, (ODD, TP, SP, LP, CP, mode("ring"), SHARD_2, "fsdp_config.comm_fusion=true")),
    "pp_fsdp_low": (4, (ODD, PP, SHARD_2, LOW, FULL)),
    "pp_fsdp_wide_boundary": (4, (ODD, PP, SHARD_2, LOW.replace("}", ", output_dtype: float32}"))),
    "pp_tp_zero_bubble": (4, (ODD, PP, TP, SP, LP, schedule("ZBVZeroBubble"))),
    "pp_cp_zero_bubble": (4, (ODD, PP, CP, mode("ring"), schedule("InterleavedZeroBubble"), SHARD_2)),
    "pp_tp_cp_interleaved": (8, (ODD, PP, TP, CP, mode("allgather"), schedule("Interleaved1F1B"), NTH, SHARD_2)),
}


def trace_second_step(overrides: tuple[str, ...]) -> tuple[Records, Volumes]:
    """Records of all ranks (on rank 0), and this rank's volumes by the formulas."""
    job = load_job(None, [*MODEL, "training.global_batch_size=4", "training.micro_batch_size=1", *overrides])
    topology, spec = Topology.resolve(job, dist.get_world_size()), load_spec("llama")
    meshes = build_meshes(topology, torch.device("cpu"))
    architecture = resolve_architecture("llama", "debug", job.model.overrides)
    rank_model = build_model(Run(job, spec, architecture, meshes, is_main=False))
    optimizer = build_optimizer(rank_model.module, job.optimizer, device=meshes.device, is_stage=topology.pp_size > 1)
    step = build_train_step(job, rank_model, optimizer, meshes)
    log = Collected()
    trace = CommTrace(rank_model.chunks, meshes, log)
    for index in (1, 2):
        whole = make_global_batch(index, job.training.global_batch_size, job.training.seq_len)
        shares = split_batch(whole, meshes.dp_rank, topology.dp_size, job.training.micro_batch_size)
        with trace.step(index):
            step.run(index, shares, whole.num_valid_tokens())
    with torch.device("meta"):
        model = spec.build(architecture)
    volumes = plan_job_volume(job, topology, model, rank=dist.get_rank(), tensor_parallel_table=TENSOR_PARALLEL_TABLE)
    expected = {(v.unit or "", v.phase, v.kind, v.axis): (v.count, v.bytes, v.sent_bytes) for v in volumes}
    return [record for record in log.records if record["step"] == 2], expected


def moved(records: Records, rank: int) -> Volumes:
    """All that one rank sent but for the scalars of loss and norm."""
    volumes: Volumes = {}
    for record in collectives(records, rank):
        if record["phase"] in ("forward", "backward", "pipeline") or record["axis"] == "tp":
            key = (record["unit"] or "", record["phase"], record["kind"], record["axis"])
            count, num_bytes, sent = volumes.get(key, (0, 0, 0))
            volumes[key] = (count + 1, num_bytes + record["bytes"], sent + record["sent_bytes"])
    return volumes


TRACES = SharedRanks(trace_second_step, {name: (size, (overrides,)) for name, (size, overrides) in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_a_job_has_its_formula(name: str, chosen_rows: list[str]) -> None:
    results = TRACES.take(name, chosen_rows)
    records, _ = results[0]
    for rank, (_, expected) in enumerate(results):
        assert moved(records, rank) == expected, f"rank {rank}"
