"""The job: every section, frozen, with every default."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtrain.config.data import DatasetConfig, TokenizerConfig
from torchtrain.config.fsdp import FSDP2Config
from torchtrain.config.kernels import KernelConfig
from torchtrain.config.model import ModelConfig
from torchtrain.config.observation import CheckpointConfig, DebugConfig, MetricsConfig, ProfilingConfig
from torchtrain.config.optimization import LRSchedulerConfig, OptimizerConfig
from torchtrain.config.parallel import AcceleratorConfig, DistConfig
from torchtrain.config.section import Section
from torchtrain.config.training import ActivationCheckpointConfig, CompileConfig, TaskConfig, TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Job(Section):
    """One training run. Data only: no torch object, nothing derived."""

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    fsdp_config: FSDP2Config = field(default_factory=FSDP2Config)
    dist_config: DistConfig = field(default_factory=DistConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    trusted_targets: tuple[str, ...] = ()
    """Import prefixes that ``_target_`` may name besides ``torchtrain.`` and ``torch.optim.``."""
