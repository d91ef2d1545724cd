"""Run a command on a virtual cluster of this machine: `python -m bench.cluster -np 4 4x300mbit COMMAND`.

Without -np the command runs once, inside the first host; without a command that is a shell. There, `ssh h1`
enters another host. The cluster is taken down when the command ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.cluster.spec import named_cluster
from bench.cluster.virtual_cluster import VirtualCluster
from bench.command import status_of


def main(argv: Sequence[str] | None = None) -> int:
    """Return the status of the command, or 1 with an explanation if the cluster cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("-np", type=int, dest="ranks", metavar="N", help="start N ranks of the command")
    parser.add_argument("cluster", metavar="CLUSTER", help="2x1.5gbit, slow-cpu, or a TOML file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(argv)
    command = options.command or [os.environ.get("SHELL", "sh")]
    return status_of("bench.cluster", partial(_run, options.cluster, options.ranks, command))


def _run(name: str, ranks: int | None, command: Sequence[str]) -> int:
    _, spec = named_cluster(name, Path())
    with VirtualCluster(spec) as cluster:
        print(f"up: {spec.describe()}", file=sys.stderr)
        if ranks is not None:
            return cluster.run(ranks, command, capture=False).returncode
        path = f"{cluster.ssh.parent}{os.pathsep}{os.environ['PATH']}"
        line = cluster.host_command(spec.hosts[0].name, ["env", f"PATH={path}", *command])
        return subprocess.run(line, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
