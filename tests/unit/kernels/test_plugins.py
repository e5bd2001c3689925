"""Section ``kernel_config``: what is refused before torch, what by the model, and what a model then computes with."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from models.registry import load_spec, resolve_architecture
from torchtrain.config.kernels import KernelConfig
from torchtrain.config.load import load_job
from torchtrain.errors import ConfigError
from torchtrain.kernels.gated_delta_rule import chunked
from torchtrain.kernels.plugins import OPS, PLUGINS, find_kernel_faults
from torchtrain.nn.gated_delta_net import GatedDeltaNet
from torchtrain.nn.kernel_plan import REGISTRY, plan_kernels
from torchtrain.trainer.kernels import dump_resolved_job, install_kernels, plan_job_kernels

FLA = "flash-linear-attention"
needs_absence = pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason=f"{FLA} is installed")


def rules(device="auto", **section):
    return [fault.rule for fault in find_kernel_faults(KernelConfig(**section), device)]


def build(family):
    with torch.device("meta"):
        return load_spec(family).build(resolve_architecture(family, "debug", {}))


def test_the_catalogue_and_the_registry_name_the_same_ops_and_backends():
    assert set(OPS) == set(REGISTRY)
    for op in OPS:
        plugins = {REGISTRY[op].backend(name).plugin for name in REGISTRY[op].names() if "poisoned" not in name}
        assert plugins - {"torch"} == {plugin.name for plugin in PLUGINS.values() if op in plugin.ops}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "auto, flash-linear-atention"}, ("must name kernel plugins, not 'flash-linear-atention'",)),
        ({"name": "auto,auto"}, ("once",)),
        ({"include_kernels": "rms_norm"}, ("names none but auto",)),
        ({"name": FLA, "include_kernels": "chunk_delta"}, ("'chunk_delta'", *OPS)),
        ({"name": FLA, "include_kernels": "rms_norm"}, ("has no backend",)),
        (
            {"name": f"liger-kernel, {FLA}", "include_kernels": "rms_norm"},
            (f"takes nothing from {FLA}",),
        ),
    ],
)
def test_names_of_nothing_are_refused_with_what_there_is(section, words):
    assert any(all(word in rule for word in words) for rule in rules(**section)), rules(**section)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("triton", "'triton': must name kernel plugins; use one of auto, flash-linear-attention, liger-kernel"),
        ("fla", 'did you mean "flash-linear-attention"?'),
        ("liger", 'did you mean "liger-kernel"?'),
        ("auto, flash-linear-atention", 'did you mean "flash-linear-attention"?'),
    ],
)
def test_what_a_plugin_is_called_elsewhere_leads_to_its_name(name, said):
    (fault,) = find_kernel_faults(KernelConfig(name=name), "auto")
    assert str(fault).endswith(said)


@needs_absence
def test_a_plugin_that_is_missing_is_installed_into_this_clone():
    (fault,) = find_kernel_faults(KernelConfig(name=FLA), "auto")
    assert fault.fix == f"use auto, or on CUDA: .venv/bin/pip install -e '.[{FLA}]'"


@needs_absence
@pytest.mark.parametrize("name", [FLA, f"auto, {FLA}", "liger-kernel"])
def test_a_plugin_that_is_not_installed_or_has_the_wrong_device_is_refused(name):
    (rule,) = rules(device="cpu", name=name)
    assert "is not installed here" in rule
    assert "computes on cuda, and accelerator.device is cpu" in rule
    assert rule.endswith("there is auto")


def test_auto_is_always_there():
    for device in ("auto", "cpu", "cuda", "npu"):
        assert rules(device=device) == []


@needs_absence
def test_the_entry_point_refuses_before_torch_with_exit_code_2():
    program = (
        "import sys; from torchtrain.train import main; code = main(['train_configs/qwen3_5_moe/debug.yaml', "
        "'--kernel_config.name=auto, flash-linear-attention', '--kernel_config.chunk_size=24']); "
        "print(code, 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "2 False"
    assert "kernel_config.name" in result.stderr
    assert "kernel_config.chunk_size" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_plugin_that_cannot_compute_what_the_model_asks_is_refused_with_all_backends():
    config = KernelConfig(name=f"auto, {FLA}")
    with pytest.raises(ConfigError) as caught:
        plan_kernels(build("qwen3_5_moe"), config, device="cuda", dtype=torch.float32)
    chunk, recurrent = caught.value.faults
    assert "cannot compute chunk_gated_delta_rule" in chunk.rule
    assert "bfloat16 or float16" in chunk.rule
    assert "torch (any device and dtype)" in recurrent.rule


def test_a_plugin_of_which_the_model_uses_nothing_is_refused():
    with pytest.raises(ConfigError) as caught:
        plan_kernels(build("llama"), KernelConfig(name=FLA), device="cuda", dtype=torch.bfloat16)
    (fault,) = caught.value.faults
    assert "which no layer of this model uses" in fault.rule


def test_chosen_backends_and_the_chunk_size_reach_the_layers_and_the_output_folder(tmp_path):
    job = load_job(None, ["kernel_config.chunk_size=16", "dataset.sources=[{path: unused}]"])
    model = build("qwen3_5_moe")
    kernels = plan_job_kernels(model, job, device="cpu")
    install_kernels(model, kernels, folder=tmp_path)
    cores = [module.core for module in model.modules() if isinstance(module, GatedDeltaNet)]
    assert [(core.rule, core.chunk_size) for core in cores] == [(chunked, 16)] * 3
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written["chunk_size"] == 16
    assert written["choices"] == {
        "chunk_gated_delta_rule": "torch",
        "fused_recurrent_gated_delta_rule": "torch",
        "grouped_mm": "torch_grouped_mm",
        "rms_norm": "torch",
    }
    resolved = tmp_path / "job.yaml"
    resolved.write_text(dump_resolved_job(job, kernels))
    assert resolved.read_text().endswith(
        "# kernels on cpu in float32: chunk_gated_delta_rule: torch, fused_recurrent_gated_delta_rule: torch, "
        "grouped_mm: torch_grouped_mm, rms_norm: torch\n"
    )
    assert load_job(resolved) == job


def test_no_plugin_is_imported_on_a_cpu():
    program = (
        "import sys, torch; from torchtrain.config.kernels import KernelConfig; "
        "from models.registry import load_spec, resolve_architecture as r; from torchtrain.nn.kernel_plan import *; "
        "model = load_spec('qwen3_5_moe').build(r('qwen3_5_moe', 'debug', {'num_hidden_layers': 1})); "
        "apply_kernels(model, plan_kernels(model, KernelConfig(), device='cpu', dtype=torch.float32)); "
        "model(torch.zeros(1, 9, dtype=torch.long)); "
        "print(any(name.split('.')[0] in ('fla', 'liger_kernel', 'triton') for name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
