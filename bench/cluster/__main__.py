"""The command `python -m bench.cluster`: up, exec, mpirun, measure, status, down."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from bench.cluster import network
from bench.cluster.link_rate import measure_two_way
from bench.cluster.spec import add_spec_arguments, equal_hosts, format_rate, spec_from_arguments
from bench.cluster.state import all_states, read_state
from bench.cluster.virtual_cluster import VirtualCluster, clean_up
from bench.errors import BenchError
from hvpipe.errors import HvpipeError

DEFAULT_NAME = "hv"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when done, 1 with an explanation when not, or the status of what ran inside."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.act(arguments)
        return status
    except HvpipeError as error:
        print(f"bench.cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cluster", description="Build and use a virtual cluster on one machine."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, act: object, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument(
            "--name", default=DEFAULT_NAME, help=f"the cluster's name (default: {DEFAULT_NAME})"
        )
        command.set_defaults(act=act)
        return command

    add_spec_arguments(add("up", _up, "build the cluster; replaces an idle one of that name"))
    execute = add("exec", _execute, "run a command inside a host: exec h0 -- COMMAND")
    execute.add_argument("host")
    execute.add_argument("command", nargs=argparse.REMAINDER)
    start = add("mpirun", _mpirun, "run a command on ranks of the hosts: mpirun -np 2 -- COMMAND")
    start.add_argument("-np", type=int, dest="ranks", help="ranks (default: every slot)")
    start.add_argument("command", nargs=argparse.REMAINDER)
    measure = add("measure", _measure, "measure a link's two-way rate between two hosts")
    measure.add_argument(
        "between", nargs="*", default=[], metavar="HOST", help="two hosts (default: the first two)"
    )
    measure.add_argument("--seconds", type=float, default=4.0)
    add("status", _status, "list the clusters of this machine")
    down = add("down", _down, "take the cluster down, and all clusters whose owner process is gone")
    down.add_argument(
        "--all", action="store_true", help="every cluster of this machine that no process holds"
    )
    return parser


def _up(arguments: argparse.Namespace) -> int:
    cluster = VirtualCluster(spec_from_arguments(arguments), arguments.name)
    cluster.up()
    print(f"{cluster.name} is up: {cluster.spec.describe()}")
    return 0


def _words(command: list[str]) -> list[str]:
    words = command[1:] if command[:1] == ["--"] else command
    if not words:
        raise BenchError("Give the command to run after `--`. Received: nothing")
    return words


def _execute(arguments: argparse.Namespace) -> int:
    line = VirtualCluster.attach(arguments.name).host_command(arguments.host, _words(arguments.command))
    return subprocess.run(line, check=False).returncode


def _mpirun(arguments: argparse.Namespace) -> int:
    cluster = VirtualCluster.attach(arguments.name)
    ranks = cluster.spec.slots if arguments.ranks is None else arguments.ranks
    return cluster.run(ranks, _words(arguments.command), capture=False).returncode


def _measure(arguments: argparse.Namespace) -> int:
    cluster = VirtualCluster.attach(arguments.name)
    hosts = arguments.between or [host.name for host in cluster.spec.hosts[:2]]
    if len(hosts) != 2:
        raise BenchError(f"A link is measured between two hosts. Received: {' '.join(hosts)}")
    print(measure_two_way(cluster, hosts[0], hosts[1], seconds=arguments.seconds).describe())
    return 0


def _status(arguments: argparse.Namespace) -> int:
    states = all_states()
    if not states:
        print("no cluster is up")
    for state in states:
        held = f"held by process {state.owner_pid}" if state.owner_alive else "stays until down"
        held = "stale, its owner is gone" if state.stale else held
        print(f"{state.name}: {held}, {len(network.processes(state.name))} processes inside")
        for index, host in enumerate(state.spec.hosts):
            cpus = "no limit" if host.cpus is None else f"{host.cpus:g} cores"
            address, rate = network.address(index), format_rate(host.rate_bits_per_s)
            print(f"  {host.name:<8} {address:<12} link {rate:<10} cpu {cpus:<10} slots {host.slots}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    network.require_privileges()
    gone = clean_up()
    names = (
        [state.name for state in all_states() if not state.owner_alive] if arguments.all else [arguments.name]
    )
    for name in names:
        known = any(state.name == name for state in all_states())
        if known and read_state(name).owner_alive:
            raise BenchError(
                f"Process {read_state(name).owner_pid} holds the cluster: end the process first. "
                f"Received: name={name!r}"
            )
        if known or network.existing_namespaces(name):
            VirtualCluster(equal_hosts(1), name).down()
            gone.append(name)
    print(f"taken down: {', '.join(gone)}" if gone else "nothing was up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
