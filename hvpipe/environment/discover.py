"""Reads from the environment who launched this process, and what Open MPI and Horovod are told."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hvpipe.errors import InitError

Launcher = Literal["mpirun", "srun", "horovodrun", "none"]


# The variables that hold rank, size, local rank and local size, by process manager; "" if only MPI knows.
# The order matters: inside a SLURM job Hydra (MPICH, Intel MPI) starts its proxies with srun. Then
# SLURM_PROCID counts proxies, and PMI_RANK counts ranks.
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MVAPICH = (
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_SLURM_PMI = ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", "")
_PMIX = ("PMIX_RANK", "", "", "")
_GLOO = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


_EAGER_LIMIT, _MAX_SEND_SIZE = "OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"
_CHOOSE_NETWORKS = (
    *("OMPI_MCA_pml", "OMPI_MCA_btl", "OMPI_MCA_mtl", "OMPI_MCA_btl_tcp_if_include"),
    *("UCX_TLS", "UCX_NET_DEVICES", "FI_PROVIDER"),
    *("I_MPI_FABRICS", "I_MPI_OFI_PROVIDER", "MPIR_CVAR_CH4_NETMOD"),
)
_LONGEST_ASKED = 120  # characters
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_EAGER_BYTES, _USUAL_EAGER_BYTES = 256 << 10, 64 << 10


@dataclass(frozen=True)
class Launch:
    """The launcher, rank and size of this process, from the environment; None for what only MPI knows."""

    launcher: Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None


_ALONE = Launch("none", 0, 1, 0, 1)


def discover(environ: Mapping[str, str] | None = None) -> Launch:
    """Find out who launched this process.

    Args:
        environ: The environment to read; None for this process's own.

    Raises:
        InitError: If a variable of the launcher is not a whole number.
    """
    env = os.environ if environ is None else environ
    # First: inside a SLURM job, or under an MPI that started horovodrun, the others' variables are set, too.
    if started_with_gloo(env):
        return _launch("horovodrun", env, _HOROVOD)
    # A SLURM batch script also has SLURM_PROCID=0, but only a job step has a number of tasks.
    in_step = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    if _OPEN_MPI[0] in env:
        return _launch("mpirun", env, _OPEN_MPI)
    if _MVAPICH[0] in env:
        return _launch("mpirun", env, _MVAPICH)
    if _HYDRA[0] in env and (not in_step or "MPI_LOCALRANKID" in env):
        return _launch("mpirun", env, _HYDRA)
    if in_step:
        step = _launch("srun", env, _SLURM_PMI if _HYDRA[0] in env else _SLURM)
        # One task is a shell of salloc or `srun --pty`. With PMIx it may be a rank that the shell launched.
        return _ALONE if step.size == 1 and _PMIX[0] not in env else step
    if _PMIX[0] in env:
        return _launch("mpirun", env, _PMIX)
    return _ALONE


def started_with_gloo(env: Mapping[str, str]) -> bool:
    """Return whether `horovodrun --gloo` started this process."""
    return _GLOO in env


@dataclass(frozen=True)
class Horovodrun:
    """What `horovodrun --gloo` tells a rank beside its number.

    Args:
        store_host: Where the store of keys and values runs, in which ranks find each other.
        store_port: Its port.
        host: The name of this rank's host, as horovodrun knows it.
        interface: The network interface that all hosts share; "": it is not known.
        elastic: Whether ranks may come and go.
    """

    store_host: str
    store_port: int
    host: str
    interface: str
    elastic: bool


def horovodrun(environ: Mapping[str, str] | None = None) -> Horovodrun:
    """Return what the horovodrun that started this process says.

    Args:
        environ: The environment to read; None for this process's own.

    Raises:
        InitError: If it does not say where its store is.
    """
    env = os.environ if environ is None else environ
    host, port = env.get(_GLOO, ""), env.get(_GLOO_PORT, "")
    if not host or not port.isdecimal():
        raise InitError(
            f"horovodrun should say where its ranks meet, in {_GLOO} and {_GLOO_PORT}. "
            f"Received: {host!r}, {port!r}"
        )
    name = env.get("HOROVOD_HOSTNAME") or socket.gethostname()
    return Horovodrun(
        host, int(port), name, env.get("HOROVOD_GLOO_IFACE", ""), env.get("HOROVOD_ELASTIC") == "1"
    )


@dataclass(frozen=True)
class TcpInterfaces:
    """The network interfaces that a job was told to use for TCP.

    Args:
        include: Names of interfaces, and networks such as "10.0.0.0/8"; empty: all.
        exclude: The same, not to be used.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def allow(self, name: str, address: str) -> bool:
        """Return whether the interface with this name and IPv4 address may be used."""
        if self.include and not _is_listed(name, address, self.include):
            return False
        return not _is_listed(name, address, self.exclude)


def tcp_interfaces(net: str = "", environ: Mapping[str, str] | None = None) -> TcpInterfaces:
    """Return what HVPIPE_NET, or else `mpirun --mca btl_tcp_if_include` or `btl_tcp_if_exclude`, says.

    Args:
        net: The setting HVPIPE_NET; "": it is not set.
        environ: The environment to read; None for this process's own.
    """
    env = os.environ if environ is None else environ
    texts = (
        (net, "")
        if net
        else (env.get(f"OMPI_MCA_btl_tcp_if_{which}", "") for which in ("include", "exclude"))
    )
    include, exclude = (tuple(one.strip() for one in text.split(",") if one.strip()) for text in texts)
    return TcpInterfaces(include, exclude)


def _is_listed(name: str, address: str, listed: tuple[str, ...]) -> bool:
    for one in listed:
        if one == name:
            return True
        with contextlib.suppress(ValueError):  # a name
            if ipaddress.ip_address(address) in ipaddress.ip_network(one, strict=False):
                return True
    return False


def prepare_open_mpi() -> None:
    """Set Open MPI's options for hvpipe, before MPI starts. Options that the user set stay as they are.

    UCX is off for shared windows: the PyPI wheel has the component without the hardware, and prints an error
    at every start. Over TCP, messages of up to 256 KiB (default: 64 KiB) are sent at once, without a
    handshake. Fewer messages for the same bytes take less time from the cores that compute. If a rank may be
    lost, MPI_Finalize has no barrier, in which it now and then would wait for a lost rank without end.
    """
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    if fault_tolerance_asked():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    if _EAGER_LIMIT not in os.environ and _MAX_SEND_SIZE not in os.environ:
        os.environ[_EAGER_LIMIT] = os.environ[_MAX_SEND_SIZE] = str(_EAGER_BYTES)


def fault_tolerance_asked() -> bool:
    """Return whether this rank was started with Open MPI's `mpirun --with-ft ulfm`."""
    return os.environ.get(_FAULT_TOLERANCE, "") in ("1", "t", "true", "yes", "y", "enabled")


def message_layer_asked() -> bool:
    """Return whether somebody told Open MPI what carries messages, as `hvpipe run --net` does."""
    return "OMPI_MCA_pml" in os.environ


def networks_asked() -> str:
    """Return what somebody told MPI about its networks: variables and values, cut if they are long."""
    told = ", ".join(f"{name}={os.environ[name]}" for name in _CHOOSE_NETWORKS if os.environ.get(name))
    text = "".join(c if c.isprintable() else "?" for c in told)
    if len(text) <= _LONGEST_ASKED:
        return text
    return f"{text[:_LONGEST_ASKED]}... ({zlib.crc32(told.encode(errors='surrogateescape')):08x})"


def eager_bytes(library: str, environ: Mapping[str, str] | None = None) -> int:
    """Return the largest message, in bytes, that this MPI (`library`) sends over TCP without a handshake."""
    text = (os.environ if environ is None else environ).get(_EAGER_LIMIT, "")
    return int(text) if "Open MPI" in library and text.isdecimal() else _USUAL_EAGER_BYTES


def _launch(launcher: Launcher, env: Mapping[str, str], names: tuple[str, str, str, str]) -> Launch:
    rank, size, local_rank, local_size = (_count(env, name) for name in names)
    return Launch(launcher, rank, size, local_rank, local_size)


def _count(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise InitError(f"The launcher should set {name} to a whole number. Received: {name}={text!r}")
    return value
