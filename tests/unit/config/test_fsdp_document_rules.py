"""Sections 4.1 and 4.2 of the FSDP2 document, line by line: what must fail, and what is set for nothing.

Each failure names the key, what must hold and the way out, before a process group or a weight exists.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

from torchtrain.config.idle_settings import find_job_warnings
from torchtrain.config.load import read_job
from torchtrain.config.rules import find_job_faults
from torchtrain.distributed.fsdp2.replicate import resolve_replicate_params
from torchtrain.distributed.fsdp2.source_layout import SourceLayout, resolve_source_layouts
from torchtrain.distributed.topology import Topology, find_topology_faults, find_topology_warnings
from torchtrain.errors import ConfigError
from torchtrain.train import check_job

PRECISION = "fsdp_config.mix_precision"
SOURCES = "dataset.sources=[{path: corpus}]"


def faults_of(*words: str, ranks: int = 8) -> list[str]:
    reading = read_job(None, [SOURCES, *words])
    assert reading.faults == ()
    return [str(fault) for fault in (*find_job_faults(reading.job), *find_topology_faults(reading.job, ranks))]


def warnings_of(*words: str, ranks: int = 8) -> list[str]:
    job = read_job(None, [SOURCES, *words]).job
    return [*find_job_warnings(job), *find_topology_warnings(job, Topology.resolve(job, ranks))]


def start(ranks: str) -> str:
    return f"start {ranks} ranks in all (on one machine: NGPU={ranks.split()[0]} ./run_train.sh)"


def test_4_1_1_dp_shard_size_below_one() -> None:
    assert faults_of("fsdp_config.dp_shard_size=0") == [
        "fsdp_config.dp_shard_size = 0: must be at least 1; use 1 or more"
    ]


def test_4_1_2_edp_shard_size_below_one() -> None:
    assert faults_of("fsdp_config.edp_shard_size=-1") == [
        "fsdp_config.edp_shard_size = -1: must be at least 1; use 1 or more"
    ]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_4_1_3_negative_prefetch_depth(direction: str) -> None:
    path = f"fsdp_config.{direction}_prefetch_depth"
    assert faults_of(f"{path}=-1") == [f"{path} = -1: must be at least 0; use 0 or more"]


@pytest.mark.parametrize(
    ("key", "size", "ranks", "fix"),
    [
        ("tp_size", 3, "6 or 12", "set accelerator.tp_size to 2 or 4"),
        ("cp_size", 5, "5 or 10", "set accelerator.cp_size to 4 or 8"),
        ("pp_size", 16, "16", "set accelerator.pp_size to 8"),
    ],
)
def test_4_1_4_world_that_tp_cp_pp_do_not_divide(key: str, size: int, ranks: str, fix: str) -> None:
    rule = f"accelerator.tp_size x accelerator.cp_size x accelerator.pp_size = {size} must divide the world size 8"
    assert faults_of(f"accelerator.{key}={size}") == [f"accelerator.{key} = {size}: {rule}; {start(ranks)}, or {fix}"]


def test_4_1_5_dp_cp_domain_that_dp_shard_size_does_not_divide() -> None:
    assert faults_of("accelerator.cp_size=2", "fsdp_config.dp_shard_size=3") == [
        "fsdp_config.dp_shard_size = 3: must divide the FSDP domain dp_size x cp_size = 4 x 2 = 8 (world size 8); "
        f"{start('6 or 12')}, or use 2 or 4"
    ]


def test_4_1_6_expert_domain_that_ep_size_does_not_divide() -> None:
    assert faults_of("accelerator={tp_size: 2, ep_size: 3}") == [
        "accelerator.ep_size = 3: must divide the expert domain dp_size x cp_size x tp_size = 8 (world size 8); "
        f"{start('6 or 12')}, or use 2 or 4"
    ]


def test_4_1_7_edp_size_that_edp_shard_size_does_not_divide() -> None:
    assert faults_of("accelerator.ep_size=2", "fsdp_config.edp_shard_size=3") == [
        "fsdp_config.edp_shard_size = 3: must divide the expert-data-parallel domain 8 / ep_size 2 = 4; "
        f"{start('6 or 12')}, or use 2 or 4"
    ]


@pytest.mark.parametrize(("dtype", "shown"), [("null", "null"), ("bfloat16", "'bfloat16'"), ("float16", "'float16'")])
def test_4_1_8_fp32_main_grad_without_reduce_dtype_float32(dtype: str, shown: str) -> None:
    words = [f"{PRECISION}={{fp32_main_grad: true, reduce_dtype: {dtype}}}", "optimizer.fp32_main_params=true"]
    assert faults_of(*words) == [
        f"{PRECISION}.reduce_dtype = {shown}: must be float32 with {PRECISION}.fp32_main_grad: true; "
        f"set {PRECISION}.reduce_dtype: float32, or {PRECISION}.fp32_main_grad: false"
    ]


@pytest.mark.parametrize(("grad", "params"), [("true", "false"), ("false", "true")])
def test_4_1_9_fp32_main_grad_without_fp32_main_params_and_the_reverse(grad: str, params: str) -> None:
    words = [f"{PRECISION}={{fp32_main_grad: {grad}, reduce_dtype: float32}}", f"optimizer.fp32_main_params={params}"]
    assert faults_of(*words) == [
        f"{PRECISION}.fp32_main_grad = {grad}: must be on or off together with optimizer.fp32_main_params = {params}; "
        f"set both to true (with {PRECISION}.reduce_dtype: float32) or both to false"
    ]


def test_4_1_10_fullgraph_with_fsdp() -> None:
    assert faults_of("compile={enabled: true, fullgraph: true}") == [
        "compile.fullgraph = true: must be false with FSDP, whose hooks break the graph (FSDP domain 8); "
        "set compile.fullgraph: false"
    ]
    assert faults_of("compile={enabled: true, fullgraph: true}", ranks=1) == []


def tiny_model() -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"norm": nn.RMSNorm(4), "head": nn.Linear(4, 4, bias=False)})


def test_4_1_11_replicate_params_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_replicate_params(tiny_model(), ["nrm.weight", "head.weight", "layers.*"])
    unknown, unmatched = map(str, caught.value.faults)
    assert unknown.startswith(
        "fsdp_config.replicate_params = 'nrm.weight': must match a parameter of the model; the nearest are norm.weight"
    )
    assert unmatched.startswith("fsdp_config.replicate_params = 'layers.*': must match a parameter of the model")


def test_4_1_11_source_metadata_that_the_model_does_not_have() -> None:
    layouts = {fqn: SourceLayout("tp", Replicate()) for fqn in ("norm.weight", "head.wieght")}
    with pytest.raises(ConfigError) as caught:
        resolve_source_layouts(tiny_model(), layouts)
    (unknown,) = map(str, caught.value.faults)
    assert unknown.startswith("source layout = 'head.wieght': must name a parameter of the model; the nearest are ")
    assert "head.weight" in unknown


def test_4_1_combined_mistakes_are_listed_at_once() -> None:
    words = [
        SOURCES,
        "fsdp_config.dp_shard_size=3",
        "fsdp_config.edp_shard_size=3",
        "fsdp_config.forward_prefetch_depth=-1",
        "fsdp_config.backward_prefetch_depth=-2",
        f"{PRECISION}.fp32_main_grad=true",
        "compile.fullgraph=true",
        "fsdp_config.wrap_policy=block",
    ]
    with pytest.raises(ConfigError) as caught:
        check_job([f"--{word}" for word in words], world_size=8)
    assert sorted(fault.path for fault in caught.value.faults) == [
        "compile.fullgraph",
        "fsdp_config.backward_prefetch_depth",
        "fsdp_config.dp_shard_size",
        "fsdp_config.edp_shard_size",
        "fsdp_config.forward_prefetch_depth",
        f"{PRECISION}.fp32_main_grad",
        f"{PRECISION}.reduce_dtype",
        "fsdp_config.wrap_policy",
    ]


@pytest.mark.parametrize(
    ("name", "reverse"), [("dp_shard_size", "edp_shard_size"), ("edp_shard_size", "dp_shard_size")]
)
def test_4_1_sizes_below_one_are_listed_with_every_other_rule_of_the_job(name: str, reverse: str) -> None:
    words = [f"fsdp_config={{{name}: 0, {reverse}: -1, forward_prefetch_depth: -1}}", "optimizer.fp32_main_params=true"]
    assert {said.split(" = ")[0] for said in faults_of(*words)} == {
        f"fsdp_config.{name}",
        f"fsdp_config.{reverse}",
        "fsdp_config.forward_prefetch_depth",
        f"{PRECISION}.fp32_main_grad",
    }


def test_4_2_1_edp_shard_size_needs_experts() -> None:
    assert warnings_of("fsdp_config.edp_shard_size=2") == [
        "fsdp_config.edp_shard_size = 2 has no effect: it needs accelerator.ep_size > 1 and a model with experts"
    ]
    assert warnings_of("fsdp_config.edp_shard_size=2", "accelerator.ep_size=2") == []


def test_4_2_2_cast_forward_inputs_needs_param_dtype() -> None:
    path = f"{PRECISION}.cast_forward_inputs"
    assert warnings_of(f"{path}=false") == [f"{path} = false has no effect: it needs {PRECISION}.param_dtype"]
    assert warnings_of(f"{path}=false", f"{PRECISION}.param_dtype=bfloat16") == []


@pytest.mark.parametrize("value", ["true", "false"])
def test_4_2_3_comm_fusion_zero_copy_needs_comm_fusion(value: str) -> None:
    path = "fsdp_config.comm_fusion_zero_copy"
    assert warnings_of(f"{path}={value}") == [f"{path} = {value} has no effect: it needs fsdp_config.comm_fusion: true"]
    assert warnings_of(f"{path}={value}", "fsdp_config.comm_fusion=true") == []


@pytest.mark.parametrize("name", ["reshard_after_backward", "requires_grad_sync"])
def test_4_2_4_accumulation_policies_need_several_micro_batches(name: str) -> None:
    assert warnings_of(f"fsdp_config.{name}=false") == [
        f"fsdp_config.{name}: false has no effect: it needs more than one micro-batch per step, that is "
        "training.global_batch_size above training.micro_batch_size x dp_size = 8"
    ]
    assert warnings_of(f"fsdp_config.{name}=false", "training.global_batch_size=16") == []


def test_4_2_5_replicate_params_take_what_the_final_model_can_resolve() -> None:
    assert resolve_replicate_params(tiny_model(), ["norm.weight"]) == {"norm.weight"}
    assert resolve_replicate_params(tiny_model(), []) == frozenset()


def test_4_2_5_replicate_params_without_an_fsdp_domain_have_no_effect() -> None:
    words = ["fsdp_config.replicate_params=[norm.weight]"]
    assert warnings_of(*words, ranks=1) == [
        "fsdp_config.replicate_params has no effect: it needs more than one data-parallel rank"
    ]
    assert warnings_of(*words, ranks=2) == []
