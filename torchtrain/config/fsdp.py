"""Section ``fsdp_config``: parameter sharding, precision and the life of an unsharded parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchtrain.config.section import Section

DTypeName = Literal["float16", "bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class MixPrecisionConfig(Section):
    """Dtypes along the path of a parameter and its gradient."""

    param_dtype: DTypeName | None = None
    """Dtype of parameters in forward and backward, after unsharding."""
    reduce_dtype: DTypeName | None = None
    """Dtype of gradient reduce-scatter and all-reduce."""
    output_dtype: DTypeName | None = None
    """Dtype that an FSDP unit's output is cast to."""
    cast_forward_inputs: bool = True
    """With ``param_dtype`` set, cast floating forward inputs to it."""
    fp32_main_grad: bool = False
    """Keep reduced gradients in fp32 for ``optimizer.fp32_main_params``; needs ``reduce_dtype: float32``."""


@dataclass(frozen=True, kw_only=True)
class FSDP2Config(Section):
    """FSDP/HSDP behaviour. There is no switch: it is on where the topology has an FSDP domain."""

    dp_shard_size: int = 1
    """Shard degree of dense parameters; the rest of dp x cp replicates."""
    edp_shard_size: int = 1
    """Shard degree of routed experts inside the expert-data-parallel domain; means something only with EP."""
    replicate_params: tuple[str, ...] = ()
    """Parameter fqns kept whole on every rank, their gradients all-reduced."""
    mix_precision: MixPrecisionConfig = field(default_factory=MixPrecisionConfig)
    """Dtypes."""
    enable_offload: bool = False
    """Keep sharded parameters, gradients and optimizer state on the CPU between uses."""
    reshard_after_forward: bool = True
    """Free a child unit's full parameters after its forward. The root always keeps them."""
    reshard_after_backward: bool = True
    """Free full parameters after each micro-batch's backward; the last one always does."""
    requires_grad_sync: bool = True
    """Reduce gradients on every micro-batch; the last one always does."""
    forward_prefetch_depth: int = 1
    """Units gathered ahead in forward; 0 is off."""
    backward_prefetch_depth: int = 1
    """Units gathered ahead in backward; 0 is off."""
    comm_fusion: bool = False
    """One all-gather and one reduce-scatter per unit instead of one per parameter."""
    comm_fusion_zero_copy: bool | None = None
    """With ``comm_fusion``: null or true keeps shards as views of one flat buffer, false copies them in."""
