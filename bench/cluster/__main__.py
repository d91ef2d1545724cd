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
from pathlib import Path

from bench.cluster.spec import named_cluster
from bench.cluster.virtual_cluster import VirtualCluster
from hvpipe.errors import HvpipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Return the status of the command, or 1 with an explanation if the cluster cannot be built."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster", description=__doc__)
    parser.add_argument("-np", type=int, dest="ranks", metavar="N", help="start N ranks of the command")
    parser.add_argument("cluster", metavar="CLUSTER", help="2x1.5gbit, slow-cpu, or a TOML file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    options = parser.parse_args(argv)
    command = options.command or [os.environ.get("SHELL", "sh")]
    try:
        _, spec = named_cluster(options.cluster, Path())
        with VirtualCluster(spec) as cluster:
            print(f"up: {spec.describe()}", file=sys.stderr)
            if options.ranks is not None:
                return cluster.run(options.ranks, command, capture=False).returncode
            path = f"{cluster.ssh.parent}{os.pathsep}{os.environ['PATH']}"
            line = cluster.host_command(spec.hosts[0].name, ["env", f"PATH={path}", *command])
            return subprocess.run(line, check=False).returncode
    except HvpipeError as error:
        print(f"bench.cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
