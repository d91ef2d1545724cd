"""Finds the best settings of a tunable system: tries all combinations of values, in turn, in rounds.

``python -m bench.tune --system horovod-tuned --hosts 2 --rate 1gbit --python .venv-peers/bin/python --keep``;
on real hosts with ``--on a:2,b:2`` instead.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.errors import ClusterError
from bench.launch.ranks import warn_if_busy
from bench.launch.termination import ended_by_exception
from bench.metrics import format_time, median, table
from bench.rounds.command import add_round_arguments, case_of, hosts_of
from bench.rounds.record import Case, Round, last_words
from bench.rounds.round import run_round
from bench.rounds.timed_steps import counted, steps_noise
from bench.systems import SYSTEMS, System
from bench.systems.tuned import Tuned, keep_tuned
from hvpipe.errors import HvpipeError

# Values around the defaults (1 ms and 128 MiB; one pack) and the examples of the documentation (3.5 ms and
# 32 MiB; 50 MiB).
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "horovod-tuned": {
        "HOROVOD_CYCLE_TIME": ("1", "3.5", "10", "30"),
        "HOROVOD_FUSION_THRESHOLD": tuple(str(mib << 20) for mib in (8, 32, 128)),
    },
    "tf-mwms-tuned": {"bytes_per_pack": tuple(str(kib << 10) for kib in (256, 1024, 4096, 16384, 51200))},
}

RunVariant = Callable[[System, int], Round]
"""Runs one round of a variant of a system."""


@dataclass(frozen=True)
class Tried:
    """One combination of values, and the steps of the slowest rank in each round."""

    values: Mapping[str, str]
    rounds: tuple[tuple[float, ...], ...]

    @property
    def step_s(self) -> float:
        """The median of all steps."""
        return median([step for each in self.rounds for step in each])

    @property
    def noise(self) -> float:
        """The relative standard error of step_s."""
        return steps_noise(self.rounds)


def search(system: System, values: Mapping[str, Sequence[str]], rounds: int, run: RunVariant) -> list[Tried]:
    """Try all combinations and return them, fastest first. ClusterError if a round has no figures."""
    every = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    steps: list[list[tuple[float, ...]]] = [[] for _ in every]
    for number in range(rounds):
        for turn in range(len(every)):
            which = (turn + number) % len(every)  # so that no combination is always first
            found = run(system.tuned(every[which]), number)
            if not found.ok:
                raise ClusterError(f"A round should end with figures. Received: {every[which]}, {found.why}")
            slowest = max(found.ranks, key=lambda rank: median(rank.step_s))
            steps[which].append(tuple(counted(found.case.task, slowest.step_s)))
    tried = [Tried(each, tuple(taken)) for each, taken in zip(every, steps, strict=True)]
    return sorted(tried, key=lambda each: each.step_s)


def source_of(tried: Sequence[Tried], case: Case, rounds: int) -> str:
    """Describe in words for a report where the fastest values come from."""
    return (
        f"the fastest of {len(tried)} by `python -m bench.tune`: {case.task.workload}, {case.cluster}, "
        f"{case.task.describe([rounds])}"
    )


def describe(tried: Sequence[Tried]) -> str:
    """Return a table for people."""
    rows = [[*each.values.values(), format_time(each.step_s), f"{each.noise:.0%}"] for each in tried]
    return table([*tried[0].values, "step", "noise"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Search, print, and keep if asked. Return 0 if all rounds had figures; print the reason and return 1 if
    not.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench.tune", description="Find the best settings of a system."
    )
    parser.add_argument("--system", default="horovod-tuned", choices=list(VALUES))
    parser.add_argument("--rounds", type=int, default=2, help="of each combination (default: 2)")
    parser.add_argument("--keep", action="store_true", help="let the system run with the fastest from now on")
    parser.add_argument("--json", action="store_true", help="print every step, as JSON")
    add_round_arguments(parser)
    arguments = parser.parse_args(argv)
    with ended_by_exception():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.rounds < 1:
            raise ValueError(f"--rounds should be at least 1. Received: --rounds {arguments.rounds}")
        warn_if_busy()
        with hosts_of(arguments) as hosts:
            case = case_of(arguments, hosts)

            def run(system: System, number: int) -> Round:
                settings = {**system.options, **system.environment}
                print(f"round {number + 1}: {settings}", file=sys.stderr, flush=True)
                return run_round(
                    case, number, hosts, arguments.timeout, python=arguments.python, system=system
                )

            tried = search(SYSTEMS[case.system], VALUES[case.system], arguments.rounds, run)
    except (ClusterError, HvpipeError, ValueError) as error:
        print(f"bench.tune: {last_words(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    as_json = [{"values": each.values, "step_s": each.step_s, "rounds": each.rounds} for each in tried]
    print(json.dumps(as_json, indent=1) if arguments.json else describe(tried))
    if arguments.keep:
        keep_tuned(case.system, Tuned(tried[0].values, source_of(tried, case, arguments.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
