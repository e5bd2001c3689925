"""Who brings backends: names for ``kernel_config``, and what can be known to be wrong with it before torch is imported.

``auto`` is what torch itself ships, picked per device. A plugin is a package of its own and is taken only where it is
named; then it must be able to do what is asked. Imports no torch and no plugin.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from torchtrain.config.kernels import KernelConfig
from torchtrain.config.nearest import did_you_mean, nearest_name
from torchtrain.errors import Fault

AUTO = "auto"
OPS = ("grouped_mm", "rms_norm", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
"""Everything that has more than one backend."""


@dataclass(frozen=True)
class KernelPlugin:
    """A package that brings backends."""

    name: str
    """In ``kernel_config.name``; of the package and of the extra that installs it, too."""
    module: str
    devices: tuple[str, ...]
    ops: tuple[str, ...]

    @property
    def is_installed(self) -> bool:
        """Whether Python finds it; looks, and does not import."""
        return importlib.util.find_spec(self.module) is not None


PLUGINS = {
    plugin.name: plugin
    for plugin in (
        KernelPlugin(
            "flash-linear-attention", "fla", ("cuda",), ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")
        ),
        KernelPlugin("liger-kernel", "liger_kernel", ("cuda",), ("rms_norm",)),
    )
}


def split_names(text: str | None) -> tuple[str, ...]:
    """Read a comma-separated list."""
    return () if text is None else tuple(name.strip() for name in text.split(","))


def named_plugins(config: KernelConfig) -> tuple[KernelPlugin, ...]:
    """The plugins that a job names, without ``auto``."""
    return tuple(PLUGINS[name] for name in split_names(config.name) if name in PLUGINS)


def included_ops(config: KernelConfig, plugin: KernelPlugin) -> tuple[str, ...]:
    """The ops that a job takes from a plugin it names."""
    wanted = split_names(config.include_kernels)
    return tuple(op for op in plugin.ops if config.include_kernels is None or op in wanted)


def find_kernel_faults(config: KernelConfig, device: str) -> list[Fault]:
    """List why section ``kernel_config`` cannot be done, whatever the model.

    Args:
        config: The section.
        device: ``accelerator.device``; of ``auto`` nothing is known yet.
    """
    return [*_name_faults(config), *_include_faults(config), *_plugin_faults(config, device)]


def _name_faults(config: KernelConfig) -> Iterator[Fault]:
    known, names = (AUTO, *PLUGINS), split_names(config.name)
    by_word = {**{name: name for name in known}, **{plugin.module: plugin.name for plugin in PLUGINS.values()}}
    for name in names:
        if name not in known:
            which = f", not {name!r}" if len(names) > 1 else ""
            meant = nearest_name(name, by_word)
            fix = did_you_mean(name if meant is None else by_word[meant], known)
            yield Fault("kernel_config.name", config.name, f"must name kernel plugins{which}", fix)
    if len(set(names)) < len(names):
        yield Fault("kernel_config.name", config.name, "must name each plugin once", "remove the second mention")


def _include_faults(config: KernelConfig) -> Iterator[Fault]:
    path, value = "kernel_config.include_kernels", config.include_kernels
    if value is None:
        return
    plugins = named_plugins(config)
    if not plugins:
        rule = "chooses among the ops of a plugin, and kernel_config.name names none but auto"
        yield Fault(path, value, rule, f"use null, or add one of {', '.join(PLUGINS)} to kernel_config.name")
        return
    offered = [op for plugin in plugins for op in plugin.ops]
    for op in split_names(value):
        if op not in OPS:
            rule = f"must name ops, of which there are {', '.join(OPS)}; not {op!r}"
            yield Fault(path, value, rule, did_you_mean(op, OPS))
        elif op not in offered:
            names = " and ".join(plugin.name for plugin in plugins)
            yield Fault(path, value, f"names {op}, of which {names} has no backend", f"use {', '.join(offered)}")
    for plugin in plugins:
        if not included_ops(config, plugin) and set(split_names(value)) <= set(offered):
            rule = f"takes nothing from {plugin.name}, which kernel_config.name names"
            yield Fault(path, value, rule, f"add one of {', '.join(plugin.ops)}, or leave the plugin out")


def _plugin_faults(config: KernelConfig, device: str) -> Iterator[Fault]:
    for plugin in named_plugins(config):
        wrongs = []
        if not plugin.is_installed:
            wrongs.append(f"{plugin.name} is not installed here")
        if device not in (AUTO, *plugin.devices):
            wrongs.append(f"{plugin.name} computes on {', '.join(plugin.devices)}, and accelerator.device is {device}")
        if wrongs:
            there = [AUTO, *(p.name for p in PLUGINS.values() if p.is_installed and device in (AUTO, *p.devices))]
            rule = f"cannot be had: {'; '.join(wrongs)}; there is {', '.join(there)}"
            fix = (
                "use auto"
                if plugin.is_installed
                else f"use auto, or on CUDA: .venv/bin/pip install -e '.[{plugin.name}]'"
            )
            yield Fault("kernel_config.name", config.name, rule, fix)
