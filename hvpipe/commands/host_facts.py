"""What `hvpipe doctor --all-hosts` asks of each host: versions, build, networks, memory, limits, GPUs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvpipe.environment.discover import tcp_interfaces
from hvpipe.environment.native import import_native, read_build_info, tensorflow_fits
from hvpipe.environment.settings import Settings
from hvpipe.environment.this_host import cpu_name, fast_network, interfaces
from hvpipe.errors import HvpipeError
from hvpipe.monitor import core_binding
from hvpipe.monitor.nvml import Nvml, NvmlMissing
from hvpipe.monitor.process_limits import cores_allowed
from hvpipe.world.ethernet import usable

TENSORFLOW_NAMES = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")
NOT_INSTALLED = "not installed"
UNLIMITED = -1
"""For a resource without a limit."""
LEAST_SHARED_BYTES = 256_000_000
"""What should be free in /dev/shm where several ranks share memory."""

_SHARED_MEMORY = "/dev/shm"
_KERNELS_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def facts_of_this_host(settings: Settings) -> dict[str, Any]:
    """Return plain values by name, which ranks of other versions of hvpipe can read, too."""
    return {
        **_versions(),
        **_build(),
        **_networks(settings),
        **_memory(),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "cpu": cpu_name(),
        "kernel": platform.release(),
        **_gpus(),
        **_ports(settings.ports),
    }


def cores_of_this_rank() -> tuple[list[int], float | None]:
    """Return the cores that this process may run on, and a container's limit on how many it keeps busy."""
    return sorted(core_binding.own_cores()), cores_allowed()


def cores_of_host(ranks: Sequence[tuple[Sequence[int], float | None]]) -> int:
    """Return how many cores the ranks of a host have together, from `cores_of_this_rank` of each.

    Ranks may be bound to different cores. A limit counts once: it is that of a container with all of them.
    """
    cores = len(set().union(*(bound for bound, _ in ranks)))
    limits = [limit for _, limit in ranks if limit is not None]
    return min(cores, max(1, int(max(limits)))) if len(limits) == len(ranks) else cores


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    packages = {"hvpipe": ("hvpipe",), "TensorFlow": TENSORFLOW_NAMES, "Keras": ("keras",)}
    packages |= {"NumPy": ("numpy",), "mpi4py": ("mpi4py",)}
    found = {
        name: next((version for each in names if (version := package_version(each))), NOT_INSTALLED)
        for name, names in packages.items()
    }
    return {"Python": platform.python_version(), **found}


def _build() -> dict[str, str]:
    """Return what hvpipe was built with, a sum of its Python files, and whether its engine loads and fits."""
    build = read_build_info()
    if build is None:
        return {"build": "not built", "code": "", "engine": "not built"}
    running = _versions()["TensorFlow"]
    engine = "loads"
    try:
        import_native()
        if build.tensorflow and running != NOT_INSTALLED and not tensorflow_fits(build.tensorflow, running):
            engine = f"is for TensorFlow {build.tensorflow}, not {running}"
    except HvpipeError as error:
        engine = f"does not load: {str(error).partition('Received: ')[2] or error}"
    built_with = (f"TensorFlow {build.tensorflow}", build.mpi or "no MPI", build.compiler or "")
    return {"build": ", ".join(filter(None, built_with)), "code": _sum_of_code(), "engine": engine}


def _sum_of_code() -> str:
    """Return 12 digits that are the same for the same Python files."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        if path.name != "_build_info.py":  # which is in an editable install elsewhere
            digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _networks(settings: Settings) -> dict[str, Any]:
    found = usable(interfaces(), tcp_interfaces(settings.net))
    return {
        "interfaces": [[each.name, each.address, each.speed_mbit] for each in found],
        "card": fast_network(),
    }


def _memory() -> dict[str, int]:
    found = {"memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    with suppress(OSError):
        stat = os.statvfs(_SHARED_MEMORY)
        found |= {
            "shared_bytes": stat.f_blocks * stat.f_frsize,
            "shared_free_bytes": stat.f_bavail * stat.f_frsize,
        }
    return found


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _gpus() -> dict[str, Any]:
    try:
        with Nvml() as nvml:
            return {"gpus": [gpu.name for gpu in nvml.gpus()], "driver": nvml.driver_version()}
    except NvmlMissing:
        return {"gpus": [], "driver": ""}


def _ports(asked: range | None) -> dict[str, Any]:
    """Return the ports that ranks may listen at, and how many of a range that was asked for are free."""
    if asked is None:
        kernels = "-".join(_KERNELS_PORTS.read_text().split()) if _KERNELS_PORTS.exists() else "any"
        return {"ports": f"{kernels}, the kernel chooses", "ports_free": None}
    return {"ports": f"{asked[0]}-{asked[-1]}", "ports_free": sum(map(_is_free, asked))}


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
