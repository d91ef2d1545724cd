"""Memory and CPU limits: control groups v1 and v2, ulimit, each rank's share."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hvpipe.monitor import process_limits
from hvpipe.monitor.process_limits import cgroup_cores, cgroup_limit_bytes, memory_figures, usable_bytes

UNLIMITED = "9223372036854771712"  # the value of version 1 without a limit


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_the_smallest_memory_limit_of_all_parents_counts_in_version_2(tmp_path: Path) -> None:
    write(tmp_path / "job/memory.max", "4000")
    write(tmp_path / "job/step/memory.max", "max")
    write(tmp_path / "job/step/task/memory.max", "5000")
    write(tmp_path / "other/memory.max", "1")
    assert cgroup_limit_bytes("0::/job/step/task\n", tmp_path) == 4000
    assert cgroup_limit_bytes("0::/job/step\n", tmp_path) == 4000
    assert cgroup_limit_bytes("0::/\n", tmp_path) is None


def test_version_1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    write(tmp_path / "memory/job/memory.limit_in_bytes", "7000")
    write(tmp_path / "memory/memory.limit_in_bytes", UNLIMITED)
    write(tmp_path / "cpu/memory.limit_in_bytes", "1")
    groups = "9:name=systemd:/job\n4:memory:/job\n1:cpu:/job\n0::/\n"
    assert cgroup_limit_bytes(groups, tmp_path) == 7000


def test_inside_a_container_the_path_may_be_missing(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "123")
    assert cgroup_limit_bytes("0::/docker/0f63\n", tmp_path) == 123
    assert cgroup_limit_bytes("", tmp_path) is None


def test_the_smallest_cpu_limit_of_all_parents_counts_in_version_2(tmp_path: Path) -> None:
    write(tmp_path / "job/cpu.max", "400000 100000")
    write(tmp_path / "job/step/cpu.max", "max 100000")
    write(tmp_path / "job/step/task/cpu.max", "50000 20000")
    write(tmp_path / "other/cpu.max", "1000 100000")
    assert cgroup_cores("0::/job/step/task\n", tmp_path) == 2.5
    assert cgroup_cores("0::/job/step\n", tmp_path) == 4.0
    assert cgroup_cores("0::/\n", tmp_path) is None


def test_cpu_limits_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "cpu/docker/0f63/cpu.cfs_quota_us", "150000")
    write(tmp_path / "cpu/docker/0f63/cpu.cfs_period_us", "100000")
    write(tmp_path / "cpu/cpu.cfs_quota_us", "-1")
    write(tmp_path / "cpu/cpu.cfs_period_us", "100000")
    groups = "4:cpu,cpuacct:/docker/0f63\n3:memory:/docker/0f63\n0::/\n"
    assert cgroup_cores(groups, tmp_path) == 1.5
    assert cgroup_cores("4:cpu,cpuacct:/\n", tmp_path) is None
    write(tmp_path / "cpu/cpu.cfs_quota_us", "400000")  # inside a container, its own limit is at the root
    assert cgroup_cores("4:cpu,cpuacct:/docker/beef\n", tmp_path) == 4.0


def test_figures_of_a_process() -> None:
    status = "Name:\tpython\nVmSize:\t  3892 kB\nVmRSS:\t    10 kB\nThreads:\t1\n"
    assert memory_figures(status) == {"VmSize": 3892 * 1024, "VmRSS": 10240}


def test_ranks_of_a_host_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < usable_bytes(2) < usable_bytes(1)
    texts = {"/proc/self/status": "VmRSS:\t 100 kB\n", "/proc/meminfo": "MemAvailable:  6000 kB\n"}
    monkeypatch.setattr(process_limits, "_read", lambda path: texts.get(str(path), ""))
    monkeypatch.setattr("os.sysconf", lambda name: 1024 if name == "SC_PAGE_SIZE" else 8000)
    assert usable_bytes(1) == 6000 * 1024, "other processes have the rest"
    texts["/proc/meminfo"] = "MemAvailable:  7990 kB\n"
    assert usable_bytes(2) == (4000 - 100) * 1024, "what this process has taken is a part of its share"


def test_ulimit_applies_to_each_process() -> None:
    limit = 3 << 30
    code = (
        "from hvpipe.monitor.process_limits import usable_bytes; print(usable_bytes(1), usable_bytes(1000))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    alone, crowded = map(int, told.stdout.split())
    assert limit / 2 < alone < limit
    assert crowded < 1e8
