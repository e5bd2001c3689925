"""Every rule that needs only the job: ranges, and keys that must agree with each other.

Not for rules that need the world size (`distributed.topology`) or the model. Each rule is a function that yields
faults, and a fault names the other keys it depends on by their full path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torchtrain.config.job import Job
from torchtrain.config.optimizers import DOTTED_NAME, find_optimizer_faults, find_target_faults
from torchtrain.config.schema import value_at
from torchtrain.errors import Fault

Rule = Callable[[Job], Iterator[Fault]]

# What topology arithmetic divides by.
_SIZES = (
    "training.global_batch_size",
    "training.micro_batch_size",
    "accelerator.tp_size",
    "accelerator.cp_size",
    "accelerator.ep_size",
    "accelerator.pp_size",
    "dist_config.ep_size",
    "fsdp_config.dp_shard_size",
    "fsdp_config.edp_shard_size",
)
_AT_LEAST_ONE = (
    *_SIZES,
    "training.steps",
    "training.seq_len",
    "training.loss_chunk_size",
    "accelerator.pp_micro_batch_size",
    "activation_checkpoint.every_n_blocks",
    "task.eval_sequences",
    "metrics.log_interval",
    "profiling.trace_steps",
)
_AT_LEAST_ZERO = (
    "fsdp_config.forward_prefetch_depth",
    "fsdp_config.backward_prefetch_depth",
    "training.seed",
    "training.gc_interval",
    "dataset.num_workers",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_steps",
    "lr_scheduler.decay_steps",
    "task.eval_interval",
    "task.sample_tokens",
    "task.sample_temperature",
    "checkpoint.interval",
    "checkpoint.keep_last",
    "profiling.trace_interval",
    "profiling.memory_snapshot_interval",
)
_ABOVE_ZERO = (
    "optimizer.lr",
    "optimizer.eps",
    "training.max_grad_norm",
    "accelerator.dist_timeout_s",
    "metrics.peak_flops",
    "checkpoint.export_max_file_gb",
)
# What the machine can take: a process group's clock, generators, and processes per rank.
_AT_MOST = {
    "accelerator.dist_timeout_s": 366 * 24 * 3600,
    "training.seed": 2**63 - 1,
    "dataset.num_workers": 1024,
}
_NOT_EMPTY = (
    "model.name",
    "model.preset",
    "model.hf_path",
    "training.output_dir",
    "dataset.cache_dir",
    "tokenizer.path",
    "checkpoint.resume",
    "compile.backend",
    "kernel_config.name",
)


def find_job_faults(job: Job) -> list[Fault]:
    """Check a job against every rule that needs only the job."""
    return [fault for rule in _RULES for fault in rule(job)]


def find_size_faults(job: Job) -> list[Fault]:
    """The faults without which topology arithmetic makes sense: sizes below 1 and an expert size given twice."""
    return [*_check_at_least_one(job, _SIZES), *_check_expert_size(job)]


def _check_at_least_one(job: Job, paths: Sequence[str]) -> Iterator[Fault]:
    for path in paths:
        value = value_at(job, path)
        if value is not None and value < 1:
            yield Fault(path, value, "must be at least 1", "use 1 or more")


def _check_ranges(job: Job) -> Iterator[Fault]:
    yield from _check_at_least_one(job, _AT_LEAST_ONE)
    for path in _AT_LEAST_ZERO:
        value = value_at(job, path)
        if value is not None and value < 0:
            yield Fault(path, value, "must be at least 0", "use 0 or more")
    for path in _ABOVE_ZERO:
        value = value_at(job, path)
        if value is not None and value <= 0:
            yield Fault(path, value, "must be above 0", _positive_fix(path))
    for path, most in _AT_MOST.items():
        if (value := value_at(job, path)) > most:
            yield Fault(path, value, f"must be at most {most}", f"use {most} or less")
    for path in _NOT_EMPTY:
        value = value_at(job, path)
        if value is not None and not value.strip():
            yield Fault(path, value, "must not be empty", "write a value, or leave the key out")


def _positive_fix(path: str) -> str:
    return "use a positive number, or null not to clip" if path == "training.max_grad_norm" else "use a positive number"


def _check_batch(job: Job) -> Iterator[Fault]:
    training, accelerator = job.training, job.accelerator
    total, micro = training.global_batch_size, training.micro_batch_size
    if total >= 1 and micro >= 1 and total % micro:
        legal = nearest_multiples(total, of=micro)
        yield Fault(
            "training.global_batch_size",
            total,
            f"must be a multiple of training.micro_batch_size = {micro} (times the data-parallel ranks)",
            f"use {legal}, or set training.micro_batch_size to {nearest_divisors(micro, of=total)}",
        )
    pp_micro = accelerator.pp_micro_batch_size
    if pp_micro is not None and pp_micro >= 1 and micro >= 1 and micro % pp_micro:
        yield Fault(
            "accelerator.pp_micro_batch_size",
            pp_micro,
            f"must divide training.micro_batch_size = {micro}",
            f"use {nearest_divisors(pp_micro, of=micro)}, or null",
        )


def _check_expert_size(job: Job) -> Iterator[Fault]:
    plugin, public = job.dist_config, job.accelerator.ep_size
    if plugin.name == "fsdpturbo":
        if public not in (1, plugin.ep_size or 1):
            yield Fault(
                "accelerator.ep_size",
                public,
                f"must agree with dist_config.ep_size = {plugin.ep_size or 1}, the expert size under fsdpturbo",
                "remove accelerator.ep_size",
            )
        return
    rule = 'belongs to the plugin fsdpturbo, but dist_config.name is "fsdp2"'
    if plugin.ep_size is not None:
        yield Fault("dist_config.ep_size", plugin.ep_size, rule, "write accelerator.ep_size")
    for path in ("dist_config.fsdp_ignored_modules", "dist_config.hook_modules"):
        if value_at(job, path):
            yield Fault(path, list(value_at(job, path)), rule, "remove it, or set dist_config.name: fsdpturbo")
    if plugin.fsdp_implementation != "native":
        yield Fault("dist_config.fsdp_implementation", plugin.fsdp_implementation, rule, "remove it")


def _check_main_grad(job: Job) -> Iterator[Fault]:
    precision, main_params = job.fsdp_config.mix_precision, job.optimizer.fp32_main_params
    prefix = "fsdp_config.mix_precision"
    if precision.fp32_main_grad and precision.reduce_dtype != "float32":
        yield Fault(
            f"{prefix}.reduce_dtype",
            precision.reduce_dtype,
            f"must be float32 with {prefix}.fp32_main_grad: true",
            f"set {prefix}.reduce_dtype: float32, or {prefix}.fp32_main_grad: false",
        )
    if precision.fp32_main_grad != main_params:
        yield Fault(
            f"{prefix}.fp32_main_grad",
            precision.fp32_main_grad,
            f"must be on or off together with optimizer.fp32_main_params = {str(main_params).lower()}",
            f"set both to true (with {prefix}.reduce_dtype: float32) or both to false",
        )


def _check_optimizer(job: Job) -> Iterator[Fault]:
    yield from find_optimizer_faults(job.optimizer)


def _check_targets(job: Job) -> Iterator[Fault]:
    for index, prefix in enumerate(job.trusted_targets):
        if not DOTTED_NAME.fullmatch(prefix.removesuffix(".")):
            yield Fault(
                f"trusted_targets.{index}", prefix, "must be a dotted import prefix", "write for example my_optimizers"
            )
    yield from find_target_faults(job.optimizer.target, job.trusted_targets)


def _check_schedule(job: Job) -> Iterator[Fault]:
    config, steps = job.lr_scheduler, job.training.steps
    if not 0 <= config.min_lr_ratio <= 1:
        yield Fault("lr_scheduler.min_lr_ratio", config.min_lr_ratio, "must be from 0 to 1", "use for example 0.1")
    if config.name == "wsd" and config.warmup_steps <= steps < config.warmup_steps + (config.decay_steps or 0):
        yield Fault(
            "lr_scheduler.decay_steps",
            config.decay_steps,
            f"must fit beside lr_scheduler.warmup_steps = {config.warmup_steps} into training.steps = {steps}",
            f"use {max(steps - config.warmup_steps, 0)} or fewer",
        )


def _check_dataset(job: Job) -> Iterator[Fault]:
    sources = job.dataset.sources
    if not sources:
        yield Fault(
            "dataset.sources", [], "must name at least one source of text", "write for example [{path: assets/corpus}]"
        )
    first_with_name: dict[str, int] = {}
    for index, source in enumerate(sources):
        path = f"dataset.sources.{index}"
        if source.weight <= 0:
            yield Fault(
                f"{path}.weight", source.weight, "must be above 0", "use a positive number, or remove the source"
            )
        if not source.path.strip():
            yield Fault(f"{path}.path", source.path, "must not be empty", "name a file or a folder")
        if source.document_separator == "":
            yield Fault(f"{path}.document_separator", "", "must not be empty", "use null for one document per file")
        first = first_with_name.setdefault(source.label, index)
        if first != index:
            rule = f"must differ from the name of dataset.sources.{first}"
            yield Fault(f"{path}.name", source.label, rule, "give each source a name of its own")


def _check_evaluation(job: Job) -> Iterator[Fault]:
    holdout = job.dataset.holdout_fraction
    if not 0 <= holdout < 1:
        yield Fault("dataset.holdout_fraction", holdout, "must be at least 0 and below 1", "use for example 0.05")
    if job.task.eval_interval > 0 and holdout == 0:
        yield Fault(
            "dataset.holdout_fraction",
            holdout,
            f"must be above 0 for evaluation: task.eval_interval is {job.task.eval_interval}",
            "use for example 0.05, or set task.eval_interval: 0",
        )


def _check_tokenizer(job: Job) -> Iterator[Fault]:
    config = job.tokenizer
    if config.path is None and config.kind in ("sentencepiece", "tokenizers"):
        rule = f"is required for tokenizer.kind: {config.kind}"
        yield Fault("tokenizer.path", None, rule, "name the tokenizer file, or use tokenizer.kind: bytes")
    if config.path is not None and config.kind == "bytes":
        yield Fault("tokenizer.path", config.path, "has no meaning for tokenizer.kind: bytes", "remove one of the two")


def _check_profiling(job: Job) -> Iterator[Fault]:
    config = job.profiling
    if 0 < config.trace_interval < config.trace_steps:
        rule = f"must not exceed profiling.trace_interval = {config.trace_interval}"
        yield Fault("profiling.trace_steps", config.trace_steps, rule, f"use {config.trace_interval} or fewer")


def nearest_multiples(value: int, *, of: int) -> str:
    """The legal neighbours of ``value`` among the multiples of ``of``, as "8 or 12"."""
    lower = value // of * of
    return f"{lower} or {lower + of}" if lower else f"{of}"


def nearest_divisors(value: int, *, of: int) -> str:
    """The legal neighbours of ``value`` among the divisors of ``of``, as "2 or 4"."""
    divisors = [candidate for candidate in range(1, of + 1) if of % candidate == 0]
    below = [divisor for divisor in divisors if divisor <= value][-1:]
    above = [divisor for divisor in divisors if divisor > value][:1]
    return " or ".join(map(str, (*below, *above)))


_RULES: tuple[Rule, ...] = (
    _check_ranges,
    _check_batch,
    _check_expert_size,
    _check_main_grad,
    _check_optimizer,
    _check_targets,
    _check_schedule,
    _check_dataset,
    _check_evaluation,
    _check_tokenizer,
    _check_profiling,
)
