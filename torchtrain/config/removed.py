"""Keys that this trainer does not have on purpose, and other trainers' words for those it has.

A key here fails like any unknown key, with a specific explanation instead of a guess.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Removed:
    """Why a key is refused, and what to do instead."""

    why: str
    instead: str


def _renamed(to: str) -> Removed:
    return Removed("is another trainer's word", f"write {to}")


_PUBLIC = "is public topology and does not belong among a plugin's private keys"
_DERIVED = "is not configured but derived from the world size"
_BY_MODEL = "is decided by the model family, so that it cannot disagree with the model"
_FSDP_IS_DERIVED = Removed(
    "does not exist: FSDP is on where the topology has an FSDP domain", "remove it; set fsdp_config.dp_shard_size"
)
_DP_SIZE = Removed(
    f"{_DERIVED}: world_size / (tp_size x cp_size x pp_size)", "remove it; start more or fewer ranks instead"
)
_REPLICATE = Removed(f"{_DERIVED}: dp_size x cp_size / dp_shard_size", "remove it; set fsdp_config.dp_shard_size")
_EDP = Removed(f"{_DERIVED}: dp_size x cp_size x tp_size / ep_size", "remove it; set fsdp_config.edp_shard_size")
_WRAP_POLICY = Removed(
    "does not exist: every transformer block is a unit, then the root", "remove it; there is nothing to set"
)
_PRECISION = Removed(
    "mixes storage and compute dtype", "set model.init_dtype and fsdp_config.mix_precision.param_dtype"
)
_ACCUMULATION = Removed(
    "is derived: global_batch_size / (micro_batch_size x dp_size)",
    "remove it; set training.global_batch_size and training.micro_batch_size",
)
_MODULES = Removed(_BY_MODEL, "remove it")
_ACCELERATOR_KEYS = (
    "tp_size",
    "cp_size",
    "pp_size",
    "cp_mode",
    "pp_schedule",
    "pp_micro_batch_size",
    "sequence_parallel",
    "loss_parallel",
    "backend",
    "device",
    "dist_timeout_s",
)

REMOVED_KEYS: dict[str, Removed] = {
    # The FSDP2 document's removed keys.
    "fsdp_config.enabled": _FSDP_IS_DERIVED,
    "fsdp_config.enable": _FSDP_IS_DERIVED,
    "fsdp_config.dp_replicate_size": _REPLICATE,
    "fsdp_config.edp_replicate_size": _EDP,
    "fsdp_config.dp_size": _DP_SIZE,
    "fsdp_config.wrap_policy": _WRAP_POLICY,
    "fsdp_config.auto_wrap_policy": _WRAP_POLICY,
    "fsdp_config.transformer_layer_cls_to_wrap": _WRAP_POLICY,
    "fsdp_config.sharding_strategy": Removed(
        "is said by numbers: dp_shard_size, and reshard_after_forward", "remove it; set fsdp_config.dp_shard_size"
    ),
    "fsdp_config.mixed_precision": _renamed("fsdp_config.mix_precision"),
    "fsdp_config.cpu_offload": _renamed("fsdp_config.enable_offload"),
    "fsdp_config.fp32_main_grad": _renamed("fsdp_config.mix_precision.fp32_main_grad"),
    "accelerator.dp_size": _DP_SIZE,
    "accelerator.dp_replicate_size": _REPLICATE,
    "dp_replicate_size": _REPLICATE,
    "dp_size": _DP_SIZE,
    # The fsdpturbo document: what may not stand among the plugin's private keys.
    **{f"dist_config.{name}": Removed(_PUBLIC, f"write accelerator.{name}") for name in _ACCELERATOR_KEYS},
    "dist_config.dist_timeout": Removed(_PUBLIC, "write accelerator.dist_timeout_s, in seconds"),
    "dist_config.dp_size": Removed(f"{_PUBLIC}; it {_DERIVED}", "remove it"),
    "dist_config.dp_shard_size": Removed(_PUBLIC, "write fsdp_config.dp_shard_size"),
    "dist_config.edp_shard_size": Removed(_PUBLIC, "write fsdp_config.edp_shard_size"),
    "dist_config.mp_shard_size": Removed(_PUBLIC, "write fsdp_config.dp_shard_size"),
    "dist_config.mp_replicate_size": Removed(f"{_PUBLIC}; it {_DERIVED}", "remove it; set fsdp_config.dp_shard_size"),
    "dist_config.ep_modules": _MODULES,
    "dist_config.ep_fsdp_modules": _MODULES,
    "ep_modules": _MODULES,
    "ep_fsdp_modules": _MODULES,
    "mp_shard_size": _renamed("fsdp_config.dp_shard_size"),
    "mp_replicate_size": _REPLICATE,
    "dist_timeout": _renamed("accelerator.dist_timeout_s, in seconds"),
    "accelerator.dist_timeout": _renamed("accelerator.dist_timeout_s, in seconds"),
    "ep_size": Removed("stands in a section", "write accelerator.ep_size; under fsdpturbo dist_config.ep_size"),
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "extends": Removed("is read from a job file, not from the command line", "write it at the top of the file"),
    # Peers' words.
    "training.bf16": _PRECISION,
    "training.dtype": _PRECISION,
    "training.mixed_precision_param": _renamed("fsdp_config.mix_precision.param_dtype"),
    "training.local_batch_size": _renamed("training.micro_batch_size"),
    "training.batch_size": Removed("is ambiguous", "set training.global_batch_size and training.micro_batch_size"),
    "training.gradient_accumulation_steps": _ACCUMULATION,
    "training.epochs": Removed("does not exist: a run is so many steps", "set training.steps"),
    "training.lr": _renamed("optimizer.lr"),
    "gradient_accumulation_steps": _ACCUMULATION,
    "per_device_train_batch_size": _renamed("training.micro_batch_size"),
    "train_batch_size": _renamed("training.global_batch_size"),
    "num_train_epochs": Removed("does not exist: a run is so many steps", "set training.steps"),
    "max_steps": _renamed("training.steps"),
    "learning_rate": _renamed("optimizer.lr"),
    "warmup_ratio": _renamed("lr_scheduler.warmup_steps"),
    "lr_scheduler_type": _renamed("lr_scheduler.name"),
    "cutoff_len": _renamed("training.seq_len"),
    "model_name_or_path": _renamed("model.name, model.preset and model.hf_path"),
    "gradient_checkpointing": _renamed("activation_checkpoint.mode: full"),
    "resume_from_checkpoint": _renamed("checkpoint.resume"),
    "save_steps": _renamed("checkpoint.interval"),
    "logging_steps": _renamed("metrics.log_interval"),
    "deepspeed": Removed("does not exist here: sharding is FSDP2's", "set fsdp_config.dp_shard_size"),
    "fsdp": _renamed("fsdp_config"),
    "parallelism": _renamed("accelerator and fsdp_config"),
    "data": _renamed("dataset"),
    "optimizer.name": _renamed("optimizer._target_, a class such as torch.optim.AdamW"),
    "optimizer.type": _renamed("optimizer._target_, a class such as torch.optim.AdamW"),
}


def explain_removed(path: str) -> Removed | None:
    """Why this key is refused, where that is known."""
    return REMOVED_KEYS.get(path)
