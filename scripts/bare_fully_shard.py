"""The benchmark's baseline: a job's model, batch and AdamW in a plain loop under bare ``fully_shard``."""

import json
import sys
import time
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from models.registry import load_spec, resolve_architecture
from torchtrain.config.load import load_job
from torchtrain.config.schema import value_at
from torchtrain.distributed.fsdp2.precision import build_mixed_precision
from torchtrain.distributed.topology import Topology
from torchtrain.runtime.device import collective_backend, has_fused_adamw, peak_memory_bytes, resolve_device
from torchtrain.runtime.env import read_launch_env

# What this loop does not do, and the value with which a job does not ask for it.
PLAIN = {"compile.enabled": False, "activation_checkpoint.mode": "none", "optimizer._target_": "torch.optim.AdamW"}
PLAIN |= {f"fsdp_config.{key}": False for key in ("enable_offload", "mix_precision.fp32_main_grad")}
PLAIN |= {f"fsdp_config.{key}": True for key in ("reshard_after_backward", "requires_grad_sync")}
PLAIN |= {f"fsdp_config.{way}_prefetch_depth": 1 for way in ("forward", "backward")}
job, launch = load_job(sys.argv[1], sys.argv[2:]), read_launch_env()
if refused := [f"{path}: {plain}" for path, plain in PLAIN.items() if value_at(job, path) != plain]:
    sys.exit(f"error: a bare loop knows none of this; for a fair comparison set {', '.join(refused)}")
device, topology = resolve_device(job.accelerator.device, launch.local_rank), Topology.resolve(job, launch.world_size)
dist.init_process_group(collective_backend(device, job.accelerator.backend))
shape = (topology.dp_replicate_size, topology.dp_shard_size)
mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
torch.manual_seed(job.training.seed)
architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
model: Any = load_spec(job.model.name).build(architecture).to(device, getattr(torch, job.model.init_dtype))
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else torch.nn.init.ones_(weight)
precision = build_mixed_precision(job.fsdp_config.mix_precision)
sharding = {"mesh": mesh if shape[0] > 1 else mesh["shard"], "mp_policy": precision}
for block in model.blocks():
    fully_shard(block, reshard_after_forward=job.fsdp_config.reshard_after_forward, **sharding)
fully_shard(model, reshard_after_forward=False, **sharding)
matrices, vectors = ([w for w in model.parameters() if (w.dim() > 1) is is_matrix] for is_matrix in (True, False))
config, fused = job.optimizer, has_fused_adamw(device) if job.optimizer.fused is None else job.optimizer.fused
groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
micro_batches = topology.gradient_accumulation_steps(job.training)
size = (micro_batches, job.training.micro_batch_size, job.training.seq_len + 1)
tokens = torch.randint(architecture.vocab_size, size, device=device)
positions = torch.arange(size[2] - 1, device=device).expand(size[1], -1)
# One document a row, but its mask is built and paid for as the trainer's is.
documents = torch.zeros_like(positions) if job.dataset.packing and job.dataset.document_aware else None
for step in range(1, job.training.steps + 1):
    started, losses = time.perf_counter(), []
    for batch in tokens:
        logits = model(batch[:, :-1], positions, documents).flatten(0, 1).float()
        losses.append(torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()) / micro_batches)
        losses[-1].backward()
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), job.training.max_grad_norm or float("inf"))
    numbers = {"step": step, "loss": sum(loss.item() for loss in losses), "grad_norm": norm.full_tensor().item()}
    optimizer.step()
    optimizer.zero_grad()
    seconds = time.perf_counter() - started
    rate = job.training.global_batch_size * job.training.seq_len / seconds
    numbers |= {"step_time_s": seconds, "tokens_per_second": rate, "peak_memory_bytes": peak_memory_bytes(device)}
    if launch.rank == 0:
        print(json.dumps(numbers), flush=True)
dist.barrier()
dist.destroy_process_group()
