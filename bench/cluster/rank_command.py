"""The mpirun command line that starts ranks on the hosts of a virtual cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.cluster.network import SUBNET
from bench.cluster.spec import ClusterSpec
from bench.errors import BenchError
from bench.launch import mpirun


def rank_command(spec: ClusterSpec, ssh: Path, ranks: int, command: Sequence[str]) -> list[str]:
    """Return the line that starts `command` on `ranks` ranks, to be run inside the first host.

    mpirun runs the script `ssh` to enter the other hosts. All data between hosts stays on the links.
    """
    if not 1 <= ranks <= spec.slots:
        raise BenchError(f"Ranks must be 1 to the cluster's {spec.slots} slots. Received: ranks={ranks}")
    program = mpirun.find_mpirun(command[0])
    major = mpirun.open_mpi_major(program)
    launcher = ["--prtemca", "plm_ssh_agent"] if major >= 5 else ["--mca", "plm_rsh_agent"]
    limited = any(host.cpus is not None for host in spec.hosts)
    # Ranks of one host communicate through its memory; ranks of different hosts only over the links.
    shared = "" if all(host.slots == 1 for host in spec.hosts) else (",sm" if major >= 5 else ",vader")
    return [
        program, *mpirun.shared_flags(major), *mpirun.yielding(ranks, limited=limited), *launcher, str(ssh),
        "--host", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts), "-np", str(ranks),
        "--mca", "pml", "ob1", "--mca", "btl", f"tcp,self{shared}", "--mca", "btl_tcp_if_include", SUBNET,
        *command,
    ]  # fmt: skip
