"""Runs a job's first steps on real ranks and brings home everything that must not depend on the topology."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from models.registry import load_spec, resolve_architecture
from tests.shared_ranks import SharedRanks
from torchtrain.config.job import Job
from torchtrain.config.load import load_job
from torchtrain.data.batch import Batch
from torchtrain.distributed.meshes import Meshes, build_meshes
from torchtrain.distributed.topology import Topology
from torchtrain.losses.cross_entropy import IGNORE_INDEX
from torchtrain.optim.build import build_optimizer
from torchtrain.optim.loss_scaler import LossScaler
from torchtrain.tasks.pretrain import PretrainTask
from torchtrain.testing.ranks import run_ranks
from torchtrain.testing.shares import split_batch, whole_gradients, whole_tensor
from torchtrain.trainer.forward_backward import build_forward_backward
from torchtrain.trainer.precision import ComputePrecision
from torchtrain.trainer.run import RankModel, Run, build_model
from torchtrain.trainer.step import TrainStep

NUM_STEPS: int = 3
VOCAB_SIZE = 101

# Odd sizes everywhere: no parameter's first dim divides by 4, and one rank of four gets nothing of some.
MODEL = (
    "model.preset=debug",
    "model.overrides={vocab_size: 101, hidden_size: 30, intermediate_size: 37, num_hidden_layers: 2, "
    "num_attention_heads: 3, num_key_value_heads: 1, head_dim: 10, tie_word_embeddings: false}",
    "dataset.sources=[{path: unused}]",
    "training.steps=3",
    "training.seq_len=16",
    "training.global_batch_size=8",
    "training.max_grad_norm=0.5",
    "optimizer.lr=1e-2",
    # AdamW divides by the root of a moment. Where a gradient is little more than rounding, the default of 1e-8 makes a
    # step of its last bits, which order of sums decides; gradients agree to 1e-6 there all the same.
    "optimizer.eps=1e-4",
    "optimizer.fused=true",
    "accelerator.device=cpu",
)


@dataclass
class Outcome:
    """What a run left: whole tensors by fqn, equal in shape on every topology."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Per step, after clipping, as the optimizer saw them."""
    weights: dict[str, Tensor] = field(default_factory=dict)


def run_topology(world_size: int, *overrides: str) -> Outcome:
    """Train ``NUM_STEPS`` steps on real ranks, which must report the same scalars and not drift apart."""
    return agree(run_ranks(train_on_this_rank, world_size, overrides))


class SharedTopologies:
    """Jobs by name, of which those of one world size share ranks: each is what ``run_topology`` would say of it."""

    def __init__(self, jobs: Mapping[str, tuple[int, Sequence[str]]]) -> None:
        rows = {name: (world_size, (tuple(overrides),)) for name, (world_size, overrides) in jobs.items()}
        self._ranks = SharedRanks(train_on_this_rank, rows)

    def run(self, name: str, chosen: Sequence[str]) -> Outcome:
        """Run a job with those that the session has chosen (fixture ``chosen_rows``)."""
        return agree(self._ranks.take(name, chosen))


def agree(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of all ranks, which must report the same scalars and hold the same weights."""
    first = outcomes[0]
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == first.losses, f"rank {rank} reports another loss"
        assert outcome.norms == first.norms, f"rank {rank} reports another norm"
    weights: dict[str, Tensor] = {}
    for rank, outcome in enumerate(outcomes):
        for fqn, weight in outcome.weights.items():
            assert weights.setdefault(fqn, weight).equal(weight), f"rank {rank} has another {fqn}"
    return merge_stages(outcomes)


def merge_stages(outcomes: Sequence[Outcome]) -> Outcome:
    """One outcome of the whole model: under pipeline parallelism each rank brings the tensors of its own stages."""
    first = outcomes[0]
    for outcome in outcomes[1:]:
        first.weights = outcome.weights | first.weights
        first.gradients = [theirs | ours for theirs, ours in zip(outcome.gradients, first.gradients, strict=True)]
    return first


@cache
def one_rank(*overrides: str) -> Outcome:
    """The reference: the same job on one rank, computed once per set of overrides."""
    return run_topology(1, *overrides)


def train_on_this_rank(overrides: tuple[str, ...]) -> Outcome:
    """Build the job as the trainer does and run its steps on made-up batches; runs on a rank."""
    job = load_job(None, [*MODEL, *overrides])
    topology = Topology.resolve(job, dist.get_world_size())
    architecture = resolve_architecture(job.model.name, job.model.preset, job.model.overrides)
    meshes = build_meshes(topology, torch.device("cpu"))
    rank_model = build_model(Run(job, load_spec(job.model.name), architecture, meshes, is_main=False))
    model = rank_model.module
    optimizer = build_optimizer(model, job.optimizer, device=meshes.device, is_stage=topology.pp_size > 1)
    step = build_train_step(job, rank_model, optimizer, meshes)
    outcome = Outcome()
    optimizer.register_step_pre_hook(lambda *_: outcome.gradients.append(whole_gradients(model)))
    training = job.training
    for index in range(NUM_STEPS):
        whole = make_global_batch(
            index, training.global_batch_size, training.seq_len, document_aware=job.dataset.document_aware
        )
        micro_batches = split_batch(whole, meshes.dp_rank, topology.dp_size, training.micro_batch_size)
        result = step.run(index + 1, micro_batches, whole.num_valid_tokens())
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.weights = {fqn: whole_tensor(parameter.detach()) for fqn, parameter in model.named_parameters()}
    outcome.weights |= {fqn: buffer.clone() for fqn, buffer in model.named_buffers() if fqn.endswith("expert_bias")}
    return outcome


def build_train_step(
    job: Job, model: RankModel, optimizer: torch.optim.Optimizer, meshes: Meshes, scaler: LossScaler | None = None
) -> TrainStep:
    """Build the step as the trainer does."""
    mix_precision = job.fsdp_config.mix_precision
    if scaler is None and mix_precision.param_dtype == "float16":
        scaler = LossScaler()
    precision = ComputePrecision(mix_precision, meshes.device, has_fsdp_domain=meshes.topology.has_fsdp_domain)
    vocab_size = resolve_architecture(job.model.name, job.model.preset, job.model.overrides).vocab_size
    return TrainStep(
        job,
        model=model.module,
        optimizer=optimizer,
        forward_backward=build_forward_backward(
            job, model, task=PretrainTask(), meshes=meshes, precision=precision, vocab_size=vocab_size
        ),
        meshes=meshes,
        scaler=scaler,
        source_names=("made_up",),
    )


def make_global_batch(step: int, num_sequences: int, seq_len: int, *, document_aware: bool = True) -> Batch:
    """Draw sequences with ragged label masks: ranks get unequal numbers of valid labels, one sequence none.

    Documents are packed, or, where the job is not aware of them, each sequence is one plain causal stream.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCAB_SIZE, (num_sequences, seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    keep = torch.rand(num_sequences, 1, generator=generator)
    labels[torch.rand(num_sequences, seq_len, generator=generator) > keep] = IGNORE_INDEX
    labels[step % num_sequences] = IGNORE_INDEX
    starts = torch.rand(num_sequences, seq_len, generator=generator) < 0.15
    starts[:, 0] = True
    documents = starts.cumsum(dim=1)
    columns = torch.arange(seq_len).expand(num_sequences, -1)
    first_column = torch.where(starts, columns, 0).cummax(dim=1).values
    return Batch(
        input_ids_BT=tokens[:, :-1],
        labels_BT=labels,
        positions_BT=columns - first_column if document_aware else columns,
        document_ids_BT=documents.int() if document_aware else None,
        source_ids_B=torch.zeros(num_sequences, dtype=torch.long),
    )
