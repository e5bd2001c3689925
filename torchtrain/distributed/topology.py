"""The sizes of every parallel axis and which rank stands where: pure arithmetic, no torch, no process group.

One pipeline stage is a contiguous block of ranks. Inside it the same ranks carry three grids: ``device_mesh`` (dp, cp,
tp), ``fsdp_non_moe_mesh`` (fsdp_replicate, fsdp_shard, tp), which is dp x cp reshaped, and ``fsdp_moe_mesh``
(edp_replicate, edp_shard, ep), which lays the whole stage out anew with the expert ranks innermost. Under the plugin
fsdpturbo the experts have (edp, efsdp, ep, expert_cp) instead. The live meshes of ``meshes`` are tested against these
grids.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torchtrain.config.job import Job
from torchtrain.config.optimizers import find_fused_faults
from torchtrain.config.rules import find_size_faults, nearest_divisors, nearest_multiples
from torchtrain.config.training import TrainingConfig
from torchtrain.distributed.pipeline_parallel.stage_plan import (
    SPLIT_BACKWARD,
    find_micro_batch_faults,
    pp_micro_batch_size,
)
from torchtrain.errors import Fault, TopologyError

_MANY_RANKS = 100_000


@dataclass(frozen=True)
class RankGrid:
    """A contiguous block of ranks laid out on named axes, the last axis fastest."""

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    first_rank: int

    @property
    def ranks(self) -> range:
        """All ranks, in grid order."""
        return range(self.first_rank, self.first_rank + math.prod(self.shape))

    def nested(self) -> list[Any]:
        """The ranks as nested lists of this shape, as a device mesh takes them."""
        rows: list[Any] = list(self.ranks)
        for size in reversed(self.shape[1:]):
            rows = [rows[start : start + size] for start in range(0, len(rows), size)]
        return rows

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where a rank stands on each axis."""
        offset, coordinate = rank - self.first_rank, []
        for size in reversed(self.shape):
            offset, position = divmod(offset, size)
            coordinate.append(position)
        return tuple(reversed(coordinate))

    def groups(self, axis_name: str) -> tuple[tuple[int, ...], ...]:
        """The rank groups along one axis; each rank is in exactly one."""
        axis = self.axis_names.index(axis_name)
        stride = math.prod(self.shape[axis + 1 :])
        starts = (rank for rank in self.ranks if self.coordinate(rank)[axis] == 0)
        return tuple(tuple(range(start, start + stride * self.shape[axis], stride)) for start in starts)


@dataclass(frozen=True)
class Topology:
    """Every size of one job on one world, each a positive integer."""

    world_size: int
    pp_size: int
    dp_size: int
    cp_size: int
    tp_size: int
    ep_size: int
    dp_replicate_size: int
    dp_shard_size: int
    edp_size: int
    edp_replicate_size: int
    edp_shard_size: int
    is_fsdpturbo: bool = False
    """Experts are laid out as the plugin does it; then ``edp_shard_size`` is its efsdp, ``edp_replicate_size`` cp."""

    @classmethod
    def resolve(cls, job: Job, world_size: int) -> Topology:
        """Derive every size.

        Raises:
            TopologyError: The sizes do not fit each other or the world.
        """
        faults = find_size_faults(job) or find_topology_faults(job, world_size)
        if faults:
            raise TopologyError(faults)
        sizes, ep_size = job.accelerator, expert_parallel_size(job)
        stage_size = world_size // sizes.pp_size
        domain, edp_size = stage_size // sizes.tp_size, stage_size // ep_size
        edp_shard_size = job.fsdp_config.edp_shard_size
        if is_fsdpturbo := job.dist_config.name == "fsdpturbo":
            edp_shard_size = domain // sizes.cp_size // ep_size
        return cls(
            world_size=world_size,
            pp_size=sizes.pp_size,
            dp_size=domain // sizes.cp_size,
            cp_size=sizes.cp_size,
            tp_size=sizes.tp_size,
            ep_size=ep_size,
            dp_replicate_size=domain // job.fsdp_config.dp_shard_size,
            dp_shard_size=job.fsdp_config.dp_shard_size,
            edp_size=edp_size,
            edp_replicate_size=edp_size // edp_shard_size,
            edp_shard_size=edp_shard_size,
            is_fsdpturbo=is_fsdpturbo,
        )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp_size

    @property
    def fsdp_domain_size(self) -> int:
        """Ranks over which dense gradients are summed: dp x cp."""
        return self.dp_size * self.cp_size

    @property
    def has_fsdp_domain(self) -> bool:
        """Whether any parameter is sharded or replicated over more than one rank by FSDP.

        Dense parameters on dp x cp, or, with expert parallelism, routed experts on edp: with dp x cp = 1 and tp > ep
        the experts alone still need their gradients summed.
        """
        return self.fsdp_domain_size > 1 or (self.ep_size > 1 and self.edp_size > 1)

    @property
    def has_expert_mesh(self) -> bool:
        """Whether experts have a mesh of their own; under fsdpturbo also on one expert-parallel rank."""
        return self.ep_size > 1 or self.is_fsdpturbo

    def gradient_accumulation_steps(self, training: TrainingConfig) -> int:
        """Micro-batches per optimizer step and rank, as they are read; see `backward_passes`."""
        return training.global_batch_size // (training.micro_batch_size * self.dp_size)

    def backward_passes(self, job: Job) -> int:
        """Micro-batches per optimizer step and rank, as they are computed: a pipeline cuts by its own size."""
        size = pp_micro_batch_size(job) if self.pp_size > 1 else job.training.micro_batch_size
        return job.training.global_batch_size // (size * self.dp_size)

    def device_mesh_ranks(self, pp_stage: int = 0) -> RankGrid:
        """(dp, cp, tp) of one stage, for the planner, TP and CP, batches and the loss."""
        return self._grid(pp_stage, dp=self.dp_size, cp=self.cp_size, tp=self.tp_size)

    def fsdp_non_moe_mesh_ranks(self, pp_stage: int = 0) -> RankGrid:
        """(fsdp_replicate, fsdp_shard, tp) of one stage: the same ranks, dp x cp reshaped."""
        return self._grid(
            pp_stage, fsdp_replicate=self.dp_replicate_size, fsdp_shard=self.dp_shard_size, tp=self.tp_size
        )

    def fsdp_moe_mesh_ranks(self, pp_stage: int = 0) -> RankGrid:
        """(edp_replicate, edp_shard, ep) over the whole of one stage, ep innermost."""
        return self._grid(
            pp_stage, edp_replicate=self.edp_replicate_size, edp_shard=self.edp_shard_size, ep=self.ep_size
        )

    def fsdpturbo_mesh_ranks(self) -> RankGrid:
        """(edp, efsdp, ep, expert_cp) over the world: the plugin's expert mesh, which has no tp and no pp."""
        return self._grid(
            0,
            edp=self.dp_size // (self.ep_size * self.edp_shard_size),
            efsdp=self.edp_shard_size,
            ep=self.ep_size,
            expert_cp=self.cp_size,
        )

    @property
    def expert_axes(self) -> tuple[str, str]:
        """Mesh axes over which experts are replicated and sharded, apart from ep."""
        return ("expert_cp", "efsdp") if self.is_fsdpturbo else ("edp_replicate", "edp_shard")

    def _grid(self, pp_stage: int, **axes: int) -> RankGrid:
        return RankGrid(tuple(axes), tuple(axes.values()), first_rank=pp_stage * self.stage_size)


def expert_parallel_size(job: Job) -> int:
    """Expert-parallel ranks: under fsdpturbo the plugin's key, else the public one."""
    return job.dist_config.ep_size or 1 if job.dist_config.name == "fsdpturbo" else job.accelerator.ep_size


def find_topology_faults(job: Job, world_size: int, *, num_experts: int = 0) -> list[Fault]:
    """Check the sizes of a job against the world.

    Sizes that are wrong by themselves are `find_job_faults`'s; with those, nothing is said about the world.

    Args:
        job: The job.
        world_size: Ranks that would train it.
        num_experts: Of the model's layers where that is known, so that the way out suits the model too; 0 is none.
    """
    if find_size_faults(job):
        return []
    indivisible = _find_indivisible_world(job, world_size)
    if indivisible is not None:
        return [indivisible]
    return list(_find_domain_faults(job, world_size, num_experts))


def fewest_ranks(job: Job) -> int:
    """The smallest world that all sizes of a job fit, its batch among them; 1 where no reasonable world does."""
    if find_size_faults(job):
        return 1
    return next(_fitting_worlds(job), _rank_multiple(job) if _rank_multiple(job) <= _MANY_RANKS else 1)


def rule_of_expert_count(num_experts: int) -> str:
    """What an expert-parallel size must be, whatever the world."""
    return f"must divide num_experts = {num_experts}, of which every rank gets as many"


def find_topology_warnings(job: Job, topology: Topology) -> list[str]:
    """Settings that on this topology have no effect, or another than one expects, each with the missing condition."""
    warnings = []
    fsdp, precision = job.fsdp_config, job.fsdp_config.mix_precision
    num_micro_batches = topology.backward_passes(job)
    if topology.pp_size > 1:
        for name in ("reshard_after_forward", "reshard_after_backward", "requires_grad_sync"):
            if not getattr(fsdp, name):
                warnings.append(
                    f"fsdp_config.{name}: false has no effect: it needs accelerator.pp_size = 1, as a pipeline gathers "
                    "parameters and reduces gradients once a step"
                )
        schedule, recompute = job.accelerator.pp_schedule, job.activation_checkpoint.mode
        if schedule in SPLIT_BACKWARD and recompute != "none":
            warnings.append(
                f"activation_checkpoint.mode = {recompute} computes a block again for its inputs and once more for "
                f"every group of its weights with accelerator.pp_schedule = {schedule}, which computes their gradients "
                "apart, about ten times in all: set it to none, or use 1F1B or Interleaved1F1B"
            )
    elif num_micro_batches == 1:
        for name in ("reshard_after_backward", "requires_grad_sync"):
            if not getattr(fsdp, name):
                warnings.append(
                    f"fsdp_config.{name}: false has no effect: it needs more than one micro-batch per step, that is "
                    f"training.global_batch_size above training.micro_batch_size x dp_size = "
                    f"{job.training.global_batch_size}"
                )
    if job.dist_config.fsdp_implementation == "custom" and num_micro_batches > 1 and not fsdp.requires_grad_sync:
        warnings.append(
            "fsdp_config.requires_grad_sync: false has no effect on experts with dist_config.fsdp_implementation: "
            "custom, which reduces their gradients in every micro-batch"
        )
    if not topology.has_fsdp_domain:
        if fsdp.enable_offload:
            warnings.append("fsdp_config.enable_offload has no effect: it needs more than one data-parallel rank")
        for name in ("forward_prefetch_depth", "backward_prefetch_depth"):
            if (depth := getattr(fsdp, name)) != 1:
                warnings.append(
                    f"fsdp_config.{name} = {depth} has no effect: it needs more than one data-parallel rank"
                )
        if fsdp.replicate_params:
            warnings.append("fsdp_config.replicate_params has no effect: it needs more than one data-parallel rank")
        for name in ("reduce_dtype", "output_dtype"):
            is_required = name == "reduce_dtype" and precision.fp32_main_grad
            if getattr(precision, name) is not None and not is_required:
                warnings.append(
                    f"fsdp_config.mix_precision.{name} has no effect: it needs more than one data-parallel rank"
                )
    elif num_micro_batches > 1 and precision.param_dtype in ("bfloat16", "float16") and precision.reduce_dtype is None:
        low = precision.param_dtype
        warnings.append(
            f"fsdp_config.mix_precision.reduce_dtype = null with param_dtype = {low} rounds gradients to {low} between "
            f"the {num_micro_batches} micro-batches of a step, how often depends on fsdp_config.requires_grad_sync: "
            "set fsdp_config.mix_precision.reduce_dtype: float32"
        )
    return warnings


def _find_indivisible_world(job: Job, world_size: int) -> Fault | None:
    sizes = {name: getattr(job.accelerator, name) for name in ("tp_size", "cp_size", "pp_size")}
    product, remaining = math.prod(sizes.values()), world_size
    for name, size in sizes.items():
        if remaining % size:
            return Fault(
                f"accelerator.{name}",
                size,
                f"accelerator.tp_size x accelerator.cp_size x accelerator.pp_size = {product} must divide the world "
                f"size {world_size}",
                f"{_advise_ranks(job, world_size)}set accelerator.{name} to {nearest_divisors(size, of=remaining)}",
            )
        remaining //= size
    return None


def _rank_multiple(job: Job) -> int:
    """What a world size must be a multiple of for every parallel size to come out whole."""
    sizes, fsdp, expert_size = (
        job.accelerator,
        job.fsdp_config,
        expert_parallel_size(job) * job.fsdp_config.edp_shard_size,
    )
    for_shards = fsdp.dp_shard_size // math.gcd(fsdp.dp_shard_size, sizes.cp_size)
    shared = 1 if job.dist_config.name == "fsdpturbo" else sizes.tp_size * sizes.cp_size
    for_experts = expert_size // math.gcd(expert_size, shared)
    return sizes.tp_size * sizes.cp_size * sizes.pp_size * math.lcm(for_shards, for_experts)


def _fitting_worlds(job: Job) -> Iterator[int]:
    """World sizes that fit every parallel size and the batch, from the smallest, as far as anybody has the ranks."""
    total, micro, multiple = job.training.global_batch_size, job.training.micro_batch_size, _rank_multiple(job)
    ranks_per_replica = math.prod(getattr(job.accelerator, name) for name in ("tp_size", "cp_size", "pp_size"))
    for world_size in range(multiple, min(_MANY_RANKS, total // micro * ranks_per_replica) + 1, multiple):
        dp_size = world_size // ranks_per_replica
        if total % (micro * dp_size) == 0 and not any(find_micro_batch_faults(job, dp_size=dp_size)):
            yield world_size


def _advise_ranks(job: Job, world_size: int) -> str:
    """The world sizes nearest to this one at which the job runs as it is, as the beginning of a way out."""
    fitting, multiple = list(_fitting_worlds(job)), _rank_multiple(job)
    below, above = (
        [size for size in fitting if size < world_size][-1:],
        [size for size in fitting if size > world_size][:1],
    )
    nearest = " or ".join(map(str, (*below, *above)))
    if not nearest and multiple <= _MANY_RANKS:
        nearest = nearest_multiples(world_size, of=multiple)
    return f"start {nearest} ranks in all ({_on_one_machine(nearest.split()[0])}), or " if nearest else ""


def _on_one_machine(ranks: object) -> str:
    return f"on one machine: NGPU={ranks} ./run_train.sh"


def _find_domain_faults(job: Job, world_size: int, num_experts: int) -> Iterator[Fault]:
    accelerator, fsdp, ep_size = job.accelerator, job.fsdp_config, expert_parallel_size(job)
    stage_size = world_size // accelerator.pp_size
    domain = stage_size // accelerator.tp_size
    if domain % fsdp.dp_shard_size:
        yield Fault(
            "fsdp_config.dp_shard_size",
            fsdp.dp_shard_size,
            f"must divide the FSDP domain dp_size x cp_size = {domain // accelerator.cp_size} x {accelerator.cp_size}"
            f" = {domain} (world size {world_size})",
            f"{_advise_ranks(job, world_size)}use {nearest_divisors(fsdp.dp_shard_size, of=domain)}",
        )
    if job.dist_config.name == "fsdpturbo":
        yield from _find_fsdpturbo_faults(job, world_size, num_experts)
    elif stage_size % ep_size or num_experts % ep_size:
        yield _explain_expert_size(
            job,
            "accelerator.ep_size",
            stage_size,
            f"the expert domain dp_size x cp_size x tp_size = {stage_size} (world size {world_size})",
            world_size=world_size,
            num_experts=num_experts,
        )
    elif (edp_size := stage_size // ep_size) % fsdp.edp_shard_size:
        yield Fault(
            "fsdp_config.edp_shard_size",
            fsdp.edp_shard_size,
            f"must divide the expert-data-parallel domain {stage_size} / ep_size {ep_size} = {edp_size}",
            f"{_advise_ranks(job, world_size)}use {nearest_divisors(fsdp.edp_shard_size, of=edp_size)}",
        )
    if job.compile.fullgraph and (domain > 1 or (ep_size > 1 and stage_size > ep_size)):
        yield Fault(
            "compile.fullgraph",
            True,
            f"must be false with FSDP, whose hooks break the graph (FSDP domain {domain})",
            "set compile.fullgraph: false",
        )
    if stage_size > 1:
        yield from find_fused_faults(job.optimizer)
    yield from _find_batch_faults(job, world_size, dp_size=domain // accelerator.cp_size)
    yield from find_micro_batch_faults(job, dp_size=domain // accelerator.cp_size)


def _explain_expert_size(
    job: Job, path: str, domain: int, domain_in_words: str, *, world_size: int, num_experts: int
) -> Fault:
    """Of a size that does not divide its domain, the model's experts, or either; the way out suits both."""
    ep_size = expert_parallel_size(job)
    fix = f"use {nearest_divisors(ep_size, of=math.gcd(domain, num_experts))}"
    if num_experts % ep_size == 0:
        return Fault(path, ep_size, f"must divide {domain_in_words}", f"{_advise_ranks(job, world_size)}{fix}")
    both = f", and {domain_in_words}" if domain % ep_size else ""
    return Fault(path, ep_size, f"{rule_of_expert_count(num_experts)}{both}", fix)


def _find_fsdpturbo_faults(job: Job, world_size: int, num_experts: int) -> Iterator[Fault]:
    sizes, ep_size, edp_shard_size = job.accelerator, expert_parallel_size(job), job.fsdp_config.edp_shard_size
    dp_size = world_size // (sizes.pp_size * sizes.tp_size * sizes.cp_size)
    for name in ("tp_size", "pp_size"):
        if (size := getattr(sizes, name)) > 1:
            yield Fault(
                f"accelerator.{name}",
                size,
                'must be 1 with dist_config.name "fsdpturbo", whose mesh (edp, efsdp, ep, expert_cp) has no such axis',
                f"set accelerator.{name}: 1, or dist_config.name: fsdp2 with accelerator.ep_size",
            )
    if dp_size % ep_size or num_experts % ep_size:
        yield _explain_expert_size(
            job,
            "dist_config.ep_size",
            dp_size,
            f"dp_size = world size / cp_size = {dp_size}",
            world_size=world_size,
            num_experts=num_experts,
        )
    elif edp_shard_size not in (1, dp_size // ep_size):
        yield Fault(
            "fsdp_config.edp_shard_size",
            edp_shard_size,
            'belongs to dist_config.name "fsdp2"; fsdpturbo shards experts over efsdp = dp_size / dist_config.ep_size '
            f"= {dp_size // ep_size}",
            "remove it",
        )


def _find_batch_faults(job: Job, world_size: int, *, dp_size: int) -> Iterator[Fault]:
    total, micro = job.training.global_batch_size, job.training.micro_batch_size
    if total % (micro * dp_size) == 0:
        return
    fix = f"use {nearest_multiples(total, of=micro * dp_size)}"
    if total % dp_size == 0:
        fix += f", or set training.micro_batch_size to {nearest_divisors(micro, of=total // dp_size)}"
    if fewer := [size for size in _fitting_worlds(job) if size < world_size]:
        fix += f", or start {fewer[-1]} ranks in all ({_on_one_machine(fewer[-1])})"
    yield Fault(
        "training.global_batch_size",
        total,
        f"must be a multiple of training.micro_batch_size x dp_size = {micro} x {dp_size} = {micro * dp_size}",
        fix,
    )
