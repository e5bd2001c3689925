"""The benchmark's baseline: a job in a plain loop under bare ``fully_shard``; ``benchmark_cases.PLAIN`` says which."""

import json
import sys
import time
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard

from models.registry import load_spec, resolve_architecture
from torchtrain.config.load import load_job
from torchtrain.distributed.fsdp2.precision import build_mixed_precision
from torchtrain.distributed.topology import Topology
from torchtrain.runtime.device import collective_backend, has_fused_adamw, peak_memory_bytes, resolve_device
from torchtrain.runtime.env import read_launch_env

job, launch = load_job(sys.argv[1], sys.argv[2:]), read_launch_env()
device, topology = resolve_device(job.accelerator.device, launch.local_rank), Topology.resolve(job, launch.world_size)
dist.init_process_group(collective_backend(device, job.accelerator.backend))
shape = (topology.dp_replicate_size, topology.dp_shard_size)
mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
torch.manual_seed(job.training.seed)
architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
model: Any = load_spec(job.model.name).build(architecture).to(device, getattr(torch, job.model.init_dtype))
for weight in model.parameters():
    torch.nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else torch.nn.init.ones_(weight)
inner, outer = (build_mixed_precision(job.fsdp_config.mix_precision, is_root=is_root) for is_root in (False, True))
mesh = mesh if shape[0] > 1 else mesh["shard"]
for block in model.blocks():
    fully_shard(block, mesh=mesh, reshard_after_forward=job.fsdp_config.reshard_after_forward, mp_policy=inner)
fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=outer)
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
    numbers |= {"step_time_s": time.perf_counter() - started, "peak_memory_bytes": peak_memory_bytes(device)}
    if launch.rank == 0:
        print(json.dumps(numbers), flush=True)
dist.barrier()
dist.destroy_process_group()
