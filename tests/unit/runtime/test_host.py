from __future__ import annotations

from pathlib import Path

import pytest

from torchtrain.runtime.host import available_memory_bytes, host_name

MIB = 2**20


def machine(folder: Path, membership: str) -> Path:
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1048576 kB\n")
    (folder / "proc" / "self" / "cgroup").write_text(membership)
    return folder / "proc"


def limit(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_this_machine_has_memory_and_a_name():
    available = available_memory_bytes()
    assert available is None or available > MIB
    assert host_name()


def test_without_a_container_the_machine_counts(tmp_path):
    proc = machine(tmp_path, "0::/\n")
    assert available_memory_bytes(proc=proc, cgroups=tmp_path / "none") == 1024 * MIB


@pytest.mark.parametrize("limited", ["", "pod", "pod/task"])
def test_the_tightest_limit_above_the_process_counts(tmp_path, limited):
    proc, groups = machine(tmp_path, "0::/pod/task\n"), tmp_path / "cgroup"
    limit(groups / "pod" / "task", memory__max="max", memory__current=1)
    limit(
        groups / limited,
        memory__max=100 * MIB,
        memory__current=90 * MIB,
        memory__stat=f"anon 5\ninactive_file {30 * MIB}",
    )
    assert available_memory_bytes(proc=proc, cgroups=groups) == 40 * MIB


def test_version_1_limits_count_too(tmp_path):
    proc, groups = machine(tmp_path, "9:name=systemd:/\n4:cpu,memory:/pod\n"), tmp_path / "cgroup"
    limit(
        groups / "memory" / "pod",
        memory__limit_in_bytes=100 * MIB,
        memory__usage_in_bytes=90 * MIB,
        memory__stat=f"total_inactive_file {5 * MIB}",
    )
    assert available_memory_bytes(proc=proc, cgroups=groups) == 15 * MIB


def test_a_system_that_does_not_say_gives_none(tmp_path):
    assert available_memory_bytes(proc=tmp_path, cgroups=tmp_path) is None
