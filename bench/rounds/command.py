"""The command `python -m bench.rounds`: run one round of one system and print it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.cluster.command import add_spec_arguments, spec_from_arguments
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import ClusterError
from bench.hosts.real_hosts import Hosts, RealHosts
from bench.launch.ranks import warn_if_busy
from bench.launch.termination import ended_by_exception
from bench.metrics import format_time, median, table
from bench.rounds.record import PARTS, Case, Round, Task
from bench.rounds.round import run_round
from bench.rounds.timed_steps import counted
from bench.systems import SYSTEMS
from bench.training.workloads import WORKLOADS
from hvpipe.errors import HvpipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one round and print it. Return 0 if it has figures; print the reason and return 1 if not."""
    arguments = _parser().parse_args(argv)
    with ended_by_exception():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        warn_if_busy()
        with hosts_of(arguments) as hosts:
            case = case_of(arguments, hosts)
            round_ = run_round(case, 0, hosts, arguments.timeout, python=arguments.python)
    except (ClusterError, HvpipeError, ValueError) as error:
        print(f"bench.rounds: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(round_.to_dict(), indent=1) if arguments.json else describe(round_))
    return 0 if round_.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rounds", description="Run one round of one system."
    )
    parser.add_argument("--system", default="hvpipe-step", choices=list(SYSTEMS))
    add_round_arguments(parser)
    parser.add_argument(
        "--epochs", type=int, default=0, help="train this many epochs of digits, prose or table instead"
    )
    parser.add_argument("--json", action="store_true", help="print everything that was measured, as JSON")
    return parser


def add_round_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained, where and for how long, for case_of. Epochs stay 0 without an option of theirs."""
    parser.set_defaults(epochs=0)
    parser.add_argument("--workload", default="resnet50", choices=list(WORKLOADS))
    parser.add_argument("--ranks", type=int, help="ranks on this host (default: 2), or on the cluster")
    add_spec_arguments(parser)
    parser.add_argument(
        "--on", metavar="LIST", help="real hosts, as in a:2,b:2, instead of a virtual cluster"
    )
    parser.add_argument("--pixels", type=int, default=64, help="side of an image, or length of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step (default: 8)")
    parser.add_argument("--shares", help="samples of each rank instead, e.g. 11,5")
    parser.add_argument("--threads", type=int, help="threads of an operation (default: cores / ranks)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps (default: 8)")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds until the round is ended")
    parser.add_argument(
        "--python",
        type=_python,
        default=sys.executable,
        help="the Python to train in, e.g. .venv-peers/bin/python",
    )


def _python(text: str) -> str:
    """Return a path that holds in any folder, as hosts reached over ssh need it. Names stay as they are."""
    return os.path.abspath(text) if "/" in text else text


@contextmanager
def hosts_of(arguments: argparse.Namespace) -> Iterator[Hosts | None]:
    """Yield the cluster or real hosts that the arguments name, up inside the block; None: this host."""
    virtual = arguments.hosts is not None or arguments.spec is not None
    if arguments.on is not None:
        if virtual:
            raise ClusterError(
                f"Give --on, or --hosts or --spec, but not both. Received: also --on {arguments.on}"
            )
        hosts = RealHosts(arguments.on)
        hosts.require_answers()
        yield hosts
    elif virtual:
        with VirtualCluster(spec_from_arguments(arguments)) as cluster:
            yield cluster
    else:
        yield None


def case_of(arguments: argparse.Namespace, hosts: Hosts | None) -> Case:
    """Return the case that the arguments describe, on a cluster, on real hosts or on this host."""
    most = 2 if hosts is None else hosts.spec.slots
    ranks = most if arguments.ranks is None else arguments.ranks
    shares = tuple(int(word) for word in arguments.shares.split(",")) if arguments.shares else ()
    threads = _threads(hosts, ranks) if arguments.threads is None else arguments.threads
    task = Task(
        workload=arguments.workload,
        batch=arguments.batch,
        pixels=arguments.pixels,
        threads=threads,
        warm_up=arguments.warm_up,
        steps=arguments.steps,
        seed=arguments.seed,
        shares=shares,
        epochs=arguments.epochs,
    )
    return Case(arguments.system, "one host" if hosts is None else hosts.spec.describe(), ranks, task)


def _threads(hosts: Hosts | None, ranks: int) -> int:
    """Return as many threads as each rank has cores of its host."""
    if isinstance(hosts, RealHosts):
        return max(1, int(hosts.cores_of_rank()))
    return max(1, (os.cpu_count() or 1) // ranks)


def describe(round_: Round) -> str:
    """Return a table by rank for people, or the reason why there are no figures."""
    case = round_.case
    head = f"{SYSTEMS[case.system].title}: {case.task.workload}, {case.ranks} ranks, {case.cluster}\n"
    head += case.task.describe([1])
    if round_.skipped or round_.error:
        return f"{head}\n{'skipped: ' + round_.skipped if round_.skipped else 'failed: ' + round_.error}"
    known = [part for part in PARTS if any(part in rank.parts_s for rank in round_.ranks)]
    rows = []
    for number, rank in enumerate(round_.ranks):
        row = [str(number), format_time(median(counted(case.task, rank.step_s))), format_time(rank.wall_s)]
        row += [f"{rank.cpu_share:.2f}", _rounded(rank.peak_bytes), _rounded(rank.sent_bytes)]
        row += [format_time(rank.first_step_s), *(format_time(rank.parts_s.get(part, 0.0)) for part in known)]
        rows.append(row)
    header = ["rank", "step", "drained", "cores", "memory", "sent", "first step", *known]
    curves = "".join(
        f"\nrank {number}: loss {', '.join(f'{loss:.4f}' for loss in rank.loss)}; "
        f"accuracy {', '.join(f'{accuracy:.4f}' for accuracy in rank.accuracy)}"
        for number, rank in enumerate(round_.ranks)
        if rank.loss
    )
    notes = "".join(f"\n- {note}" for note in round_.notes)
    return f"{head}\n{round_.versions}; {round_.taken_s:.0f} s in all\n{table(header, rows)}{curves}{notes}"


def _rounded(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g} MB"
