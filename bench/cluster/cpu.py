"""CPU time of a virtual host: a cgroup with a quota, in version 1 or 2, whichever has the cpu controller."""

from __future__ import annotations

import time
from pathlib import Path

from bench.cluster.spec import ClusterSpec
from bench.errors import BenchError

_PERIOD_US = 20_000  # short, so that a slow host is slow all the time instead of stopping for long


def group(cluster: str) -> Path | None:
    """Return the folder of a cluster's cgroups, which may not exist; None without a cpu controller."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(mount) / f"hvpipe-{cluster}"
        controllers = Path(mount) / "cgroup.controllers"
        if kind == "cgroup2" and "cpu" in controllers.read_text().split():
            return Path(mount) / f"hvpipe-{cluster}"
    return None


def build(cluster: str, spec: ClusterSpec) -> None:
    """Make one cgroup for each host whose CPU time is limited."""
    limited = [host for host in spec.hosts if host.cpus is not None]
    if not limited:
        return
    top = group(cluster)
    if top is None:
        raise BenchError(
            "Limiting a host's CPU time needs the cgroup cpu controller, version 1 or 2; none is mounted. "
            f"Received: cpus={limited[0].cpus} for host {limited[0].name}"
        )
    try:
        top.mkdir(exist_ok=True)
        _delegate(top)
        for host in limited:
            assert host.cpus is not None
            directory = top / host.name
            directory.mkdir(exist_ok=True)
            _set_quota(directory, host.cpus)
    except OSError as error:
        raise BenchError(
            f"The cgroup {top} cannot be set up ({error}). Run on the machine itself, not in an unprivileged "
            "container, or leave `cpus` out."
        ) from error


def _delegate(top: Path) -> None:
    """Switch the controller on from the root down, which version 2 needs. Version 1 has no such file."""
    for directory in (top.parent, top):
        switch = directory / "cgroup.subtree_control"
        if switch.exists() and "cpu" not in switch.read_text().split():
            switch.write_text("+cpu")


def _set_quota(directory: Path, cpus: float) -> None:
    quota_us = max(1000, round(cpus * _PERIOD_US))
    if (directory / "cpu.cfs_quota_us").exists():
        (directory / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (directory / "cpu.cfs_quota_us").write_text(str(quota_us))
    else:
        (directory / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")


def remove(cluster: str, patience_s: float = 2.0) -> None:
    """Delete the cluster's cgroups. The kernel may still be removing their ended processes."""
    top = group(cluster)
    if top is None or not top.is_dir():
        return
    deadline = time.monotonic() + patience_s
    while True:
        try:
            for directory in [path for path in top.iterdir() if path.is_dir()]:
                directory.rmdir()
            top.rmdir()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"The cgroup {top} cannot be removed after {patience_s:g} s: {error}."
                ) from error
            time.sleep(0.05)
