"""The mpirun command of a job: its flags, and the environment of its ranks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.lost_hosts import is_this_host
from hvpipe.commands.mpirun import Family, Mpirun
from hvpipe.errors import LaunchError

BINDINGS = ("none", "core", "numa", "socket")

_LEAST_PORTS = 3  # of one rank, with the launcher's

# Options of mpirun that may place ranks on other hosts.
_NAMING_HOSTS = frozenset(
    f"{dash}{name}" for dash in ("-", "--") for name in ("host", "hostfile", "machinefile", "hosts", "H", "f")
)
# A name that began with a dash would be an option of mpirun.
_NETWORKS = re.compile(r"[a-zA-Z0-9_][\w.:/@,-]*", re.ASCII)
# Variables that belong to one host, user session or process; ranks on other hosts keep theirs.
_OF_ONE_HOST = re.compile(
    "HOME|HOST|HOSTNAME|LOGNAME|USER|MAIL|SHELL|SHLVL|PWD|OLDPWD|TERM|DISPLAY|TMP|TEMP|TMPDIR|PS1|LS_COLORS|_"
    "|K_MPI_JOB_ROLE|JOB_COMPLETION_INDEX|NVIDIA_DRIVER_CAPABILITIES"
    "|.*(CUDA|NVIDIA)_VISIBLE_DEVICES|(XDG|SSH|DBUS|OMPI|OPAL|PRTE|PMIX|PMI|SLURM|PBS|LSB|LS|SGE|FLUX)_.*"
)


@dataclass(frozen=True)
class LaunchSpec:
    """All inputs of `mpirun_command`.

    Attributes:
        mpirun: The mpirun to use.
        ranks: The number of ranks.
        command: The command line of each rank.
        hosts: The hosts of the ranks. Without hosts, all ranks run on this host, or on the hosts that a batch
            system has allocated.
        cores: Cores of this host.
        as_root: Whether the user is root.
        allocated: Whether a batch system has allocated hosts.
        bind: What ranks are bound to, one of BINDINGS.
        rsh_agent: The command that reaches other hosts, instead of ssh.
        network: An interface or CIDR; then all data between hosts uses TCP on it.
        ports: Where ranks and MPI's daemons listen; None: the kernel chooses.
        export: Environment variables that other hosts should get.
        launcher_args: More arguments for mpirun, which override hvpipe's own.
        elastic: Whether ranks go on after one of them was lost.
    """

    mpirun: Mpirun
    ranks: int
    command: tuple[str, ...]
    hosts: tuple[HostSlots, ...] = ()
    cores: int = 1
    as_root: bool = False
    allocated: bool = False
    bind: str = "none"
    rsh_agent: str | None = None
    network: str | None = None
    ports: range | None = None
    export: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()
    elastic: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise LaunchError(f"-np should be at least 1. Received: ranks={self.ranks}")
        if self.bind not in BINDINGS:
            raise LaunchError(f"--bind should be one of {', '.join(BINDINGS)}. Received: bind={self.bind!r}")
        if self.elastic and (self.mpirun.family != "Open MPI" or self.mpirun.version[0] < 5):
            raise LaunchError(
                "--elastic needs Open MPI 5 with ULFM, its fault tolerance. Otherwise use --restarts with "
                "hk.Checkpoint. "
                f"Received: {self.mpirun.name}"
            )
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.ranks > slots:
            listed = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise LaunchError(
                f"{self.ranks} ranks need {self.ranks} slots: give the hosts more slots (--hosts a:2,b:2), "
                f"or start fewer ranks (-np). Received: -np {self.ranks} with {slots} slots on {listed}"
            )
        if self.network is not None and not _NETWORKS.fullmatch(self.network):
            raise LaunchError(
                "--net should name interfaces or networks, as in eth0 or 10.0.0.0/24. "
                f"Received: --net {self.network!r}"
            )
        if self.ports is not None and len(self.ports) < _LEAST_PORTS:
            raise LaunchError(
                "--ports should have a port for the launcher and two for each rank of a host. "
                f"Received: --ports {self.ports[0]}-{self.ports[-1]}"
            )
        if ":" in self.command:
            raise LaunchError(
                "No argument should be a lone colon, because mpirun takes it as the end of the command. "
                f"Received: {' '.join(self.command)}"
            )
        if self.bind == "core" and self.on_one_machine and self.ranks > self.cores:
            raise LaunchError(
                f"--bind core needs a core for each rank. Received: {self.ranks} ranks on {self.cores} cores"
            )

    @property
    def on_one_machine(self) -> bool:
        """True if every rank certainly runs on this host."""
        return not self.hosts and not self.allocated and _NAMING_HOSTS.isdisjoint(self.launcher_args)


def mpirun_command(spec: LaunchSpec) -> list[str]:
    """Return the command line that starts the ranks."""
    flags = _open_mpi_flags(spec) if spec.mpirun.family == "Open MPI" else _hydra_flags(spec)
    given = set(spec.launcher_args)
    given.update(f"--mca {name}" for name in _after(spec.launcher_args, ("--mca", "-mca")))
    given.update(f"--prtemca {name}" for name in _after(spec.launcher_args, ("--prtemca",)))
    chosen = [word for flag in flags if not _is_given(flag, given) for word in flag]
    return [spec.mpirun.path, "-np", str(spec.ranks), *chosen, *spec.launcher_args, *spec.command]


def exported_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that ranks on other hosts should get: all but those of one host."""
    return tuple(
        sorted(n for n in environ if re.fullmatch(r"[A-Za-z_]\w*", n) and not _OF_ONE_HOST.fullmatch(n))
    )


def thread_settings(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that give each rank its share of this host's cores.

    Without them every rank starts a thread per core. Nothing is set for other hosts, whose cores are unknown,
    or for bound ranks, which see only their own cores. The user's own settings stay as they are.
    """
    named_here = len(spec.hosts) == 1 and is_this_host(spec.hosts[0].name)
    if not (spec.on_one_machine or named_here) or spec.ranks == 1 or spec.bind != "none":
        return {}
    threads = str(max(1, spec.cores // spec.ranks))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    return {name: threads for name in names if name not in environ}


def launcher_settings(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for what MPICH's and Intel MPI's mpirun have no flags for.

    The user's own settings stay as they are, except the PMI of srun: these launchers start a helper on each
    host with srun inside a SLURM job, and a second PMI there would confuse the ranks.
    """
    if spec.mpirun.family == "Open MPI":
        return {}
    settings: dict[str, str] = {}
    if spec.ports is not None:
        settings |= _port_settings(spec.mpirun.family, spec.ports)
    if spec.network is not None:  # MPI's data goes by UCX or libfabric, whose choice -iface does not change
        settings |= {"UCX_NET_DEVICES": spec.network, "UCX_TLS": "tcp,sm,self"}
        settings |= {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": spec.network, "HVPIPE_NET": spec.network}
    if spec.mpirun.family == "Intel MPI":
        share = str(spec.cores // spec.ranks) if spec.bind == "core" and spec.on_one_machine else spec.bind
        settings |= {"I_MPI_PIN": "off"} if spec.bind == "none" else {"I_MPI_PIN_DOMAIN": share}
    if words := shlex.split(spec.rsh_agent or "")[1:]:
        name = "HYDRA_LAUNCHER_EXTRA_ARGS"
        if spec.mpirun.family == "Intel MPI":
            name = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
        settings[name] = _joined(words, spec, " ")
    settings = {name: value for name, value in settings.items() if name not in environ}
    return {**settings, "SLURM_MPI_TYPE": "none"} if spec.allocated else settings


def _port_settings(family: Family, ports: range) -> dict[str, str]:
    """Return the variables by which Hydra, MPI, and libfabric's and UCX' TCP choose ports."""
    both = f"{ports[0]}:{ports[-1]}"
    names = ("MPIEXEC_PORT_RANGE", "MPIR_CVAR_CH3_PORT_RANGE")
    if family == "Intel MPI":
        names = ("MPIEXEC_PORT_RANGE", "I_MPI_PORT_RANGE")
    return {
        **dict.fromkeys(names, both),
        "FI_TCP_PORT_LOW_RANGE": str(ports[0]),
        "FI_TCP_PORT_HIGH_RANGE": str(ports[-1]),
        "UCX_TCP_PORT_RANGE": f"{ports[1]}-{ports[-1]}",
    }


def _joined(words: Sequence[str], spec: LaunchSpec, splits_at: str) -> str:
    """Join words of --rsh-agent for mpirun. Raises LaunchError for one that mpirun would split."""
    if odd := [word for word in words if not word or set(word) & set(splits_at)]:
        raise LaunchError(
            f"{spec.mpirun.family} splits --rsh-agent at any of {splits_at!r}: put such words into a script. "
            f"Received: {odd[0]!r}"
        )
    return " ".join(words)


def _open_mpi_flags(spec: LaunchSpec) -> list[tuple[str, ...]]:
    is_5 = spec.mpirun.version[0] >= 5
    daemon = ("--prtemca",) if is_5 else ("--mca",)
    flags: list[tuple[str, ...]] = []
    if spec.as_root:
        flags.append(("--allow-run-as-root",))
    if spec.elastic:
        flags.append(("--with-ft", "ulfm"))
    if spec.hosts:
        flags.append(("--host", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts)))
    flags += _open_mpi_placement(spec, is_5)
    if spec.rsh_agent is not None:
        agent = ("--prtemca", "plm_ssh_agent") if is_5 else ("--mca", "plm_rsh_agent")
        flags.append((*agent, _joined(shlex.split(spec.rsh_agent), spec, " :")))
    if spec.network is not None:
        if not is_5:
            flags.append(("--mca", "oob_tcp_if_include", spec.network))
        elif (
            "/" not in spec.network
        ):  # mpirun 5.0.11 finds no interface for a CIDR here, and prints a long error
            flags.append(("--prtemca", "prte_if_include", spec.network))
        flags.append(("--mca", "btl_tcp_if_include", spec.network))
        # Without these two, UCX or libfabric would carry the data, on a network of their choice.
        flags.append(("--mca", "pml", "ob1"))
        flags.append(("--mca", "btl", "tcp,sm,self" if is_5 else "tcp,vader,self"))
    if spec.ports is not None:
        # The first one is for Open MPI's daemon, which would take each of a range.
        for family in ("v4", "v6"):
            flags.append((*daemon, f"oob_tcp_dynamic_ip{family}_ports", str(spec.ports[0])))
            flags.append(("--mca", f"btl_tcp_port_min_{family}", str(spec.ports[1])))
            flags.append(("--mca", f"btl_tcp_port_range_{family}", str(len(spec.ports) - 1)))
    if not spec.on_one_machine:
        flags += [("-x", name) for name in spec.export]
    return flags


def _open_mpi_placement(spec: LaunchSpec, is_5: bool) -> list[tuple[str, ...]]:
    """Return the flags for mapping and binding.

    By default Open MPI binds each of two ranks to one core, and TensorFlow would use only that. It also
    counts physical cores as slots, and refuses more ranks than slots unless told otherwise.
    """
    bind = "package" if spec.bind == "socket" and is_5 else spec.bind
    if spec.bind == "core" and spec.on_one_machine:
        share = f"slot:PE={spec.cores // spec.ranks}"
        return [("--map-by", share), ("--bind-to", "core")]
    flags: list[tuple[str, ...]] = [("--bind-to", bind)]
    if spec.on_one_machine:
        flags.insert(0, ("--map-by", ":OVERSUBSCRIBE") if is_5 else ("--oversubscribe",))
    return flags


def _hydra_flags(spec: LaunchSpec) -> list[tuple[str, ...]]:
    """Return the flags of Hydra, the launcher of MPICH and Intel MPI. It passes on the whole environment."""
    intel = spec.mpirun.family == "Intel MPI"
    flags: list[tuple[str, ...]] = []
    if spec.hosts and intel:
        flags += _intel_hosts(spec.hosts)
    elif spec.hosts:
        flags.append(("-hosts", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts)))
    if not intel:  # whose binding is a matter of `launcher_settings`
        share = f":{spec.cores // spec.ranks}" if spec.bind == "core" and spec.on_one_machine else ""
        flags.append(("-bind-to", spec.bind + share))
    if spec.rsh_agent is not None:
        flags += [("-launcher", "rsh"), ("-launcher-exec", shlex.split(spec.rsh_agent)[0])]
    if spec.network is not None:
        if "/" in spec.network:
            raise LaunchError(
                f"--net should name an interface with {spec.mpirun.family}. Received: --net {spec.network!r}"
            )
        flags.append(("-iface", spec.network))
    return flags


def _intel_hosts(hosts: tuple[HostSlots, ...]) -> list[tuple[str, ...]]:
    """Intel MPI ignores slots: it takes a number for all hosts. A host may be named several times."""
    slots = {host.slots for host in hosts}
    if len(slots) == 1:
        return [("-hosts", ",".join(host.name for host in hosts)), ("-ppn", str(slots.pop()))]
    names = [host.name for host in hosts for _ in range(host.slots)]
    return [("-hosts", ",".join(names)), ("-ppn", "1")]


def _is_given(flag: tuple[str, ...], given: set[str]) -> bool:
    """Tell whether the user's mpirun arguments already set this. Open MPI refuses an option given twice."""
    if flag[0] in ("--mca", "--prtemca"):
        return f"{flag[0]} {flag[1]}" in given
    if flag[0] == "-x":
        return False
    return flag[0] in given


def _after(words: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    return [following for word, following in pairwise(words) if word in options]
