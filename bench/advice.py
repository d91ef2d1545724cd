"""How true the advice of `hvpipe report` is: what its first change promises, and what that change brings.

    python -m bench.advice
    python -m bench.advice --case 2x300mbit,mobilenetv2,8,none

A case trains with a trace, takes the first change of mode, compression or batch that is advised, and trains
with it; three times, since a step takes more time in one run than in the next. A step is the mean of the
slowest rank's, as of a long training. Not counted are what "local" takes to build its graphs, its first
round, in which nothing is on its way, and the wait for its last average.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

from bench.command import status_of
from bench.errors import BenchError
from bench.hosts.hosts import Hosts
from bench.hosts.rank_benchmark import hosts_of
from bench.metrics import format_time, table
from bench.rounds.record import UNTIL_BUILT, Case, Task
from bench.rounds.round import run_round
from bench.systems import SYSTEMS, System
from bench.systems.system import usual_python
from hvpipe.trace.advice import changes, step_parts
from hvpipe.trace.events import Trace

CASES = (
    ("2x1gbit", "resnet50", 8, "none"),
    ("2x1gbit", "resnet50", 8, "step"),
    ("2x1gbit", "mobilenetv2", 32, "none"),
    ("2x300mbit", "mobilenetv2", 8, "none"),
    ("2x300mbit", "mobilenetv2", 8, "backward"),
    ("2x300mbit", "mobilenetv2", 8, "step"),
    ("2x100mbit", "mobilenetv2", 8, "step"),
    ("2x300mbit", "transformer", 8, "none"),
    ("2x300mbit", "transformer", 8, "step"),
    ("4x1gbit", "mobilenetv2", 8, "none"),
)
_EXACT = ("none", "backward", "step")  # of which there is advice
_CLOSE = 0.15
_LIMIT_S = 900.0
_STEPS, _LOCAL_STEPS = 30, 64
_MODE = re.compile(r'overlap="(\w+)"(?:, every=(\d+))?|compression="(\w+)"')


def trained(
    hosts: Hosts, cluster: str, workload: str, batch: int, options: dict[str, str], trace: Path
) -> float:
    """Train some steps with these options of hvpipe. Return the seconds of one."""
    usual = SYSTEMS["hvpipe-local" if options["overlap"] == "local" else "hvpipe-step"]
    system: System = replace(usual, name="hvpipe", options=options, environment={"HVPIPE_TRACE": str(trace)})
    steps = _LOCAL_STEPS if options["overlap"] == "local" else _STEPS
    task = Task(workload, batch, threads=max(1, int(hosts.cores_of_rank())), warm_up=UNTIL_BUILT, steps=steps)
    case = Case("hvpipe", cluster, hosts.spec.slots, task)
    found = run_round(case, 0, hosts, _LIMIT_S, python=usual_python(), systems={"hvpipe": system})
    if not found.ok:
        raise BenchError(f"A case should train. Received: {found.why}")
    return found.usual_s


def row(case: tuple[str, str, int, str], rounds: int) -> list[str]:
    """Return the cells of a case: what was advised, and the medians of what was promised and measured.

    The run with the change follows the run without it in each round.
    """
    cluster, workload, batch, overlap = case
    before_s, after_s, promised = [], [], []
    found, what = ["none", "", "", ""], ""
    with tempfile.TemporaryDirectory(prefix="hvpipe-advice-") as folder, hosts_of(cluster, None) as hosts:
        file, options = Path(folder, "trace.json"), {"overlap": overlap}
        for _ in range(rounds):
            before_s.append(trained(hosts, cluster, workload, batch, options, file))
            advised = _advised(Trace.read(file))
            what = what or next((each for each in advised if _MODE.search(each) or "batch," in each), "")
            if not what:
                break
            if what in advised:  # another round may have three better changes
                promised.append(advised[what])
            more = 2 if _MODE.search(what) is None else 1
            changed = options | _options_of(what)
            after_s.append(trained(hosts, cluster, workload, more * batch, changed, file) / more)
    if what:
        promise, measured = median(promised), median(before_s) / median(after_s)
        found = [what, f"{promise:.2f}x", f"{measured:.2f}x", f"{promise / measured - 1:+.0%}"]
    return [cluster, f"{workload}, {batch}", overlap, format_time(median(before_s)), *found]


def _advised(trace: Trace) -> dict[str, float]:
    """Return the speedup that each change promises, the best first."""
    parts = step_parts(trace)
    if isinstance(parts, str):
        raise BenchError(f"A case should have advice. Received: {parts}")
    return {each.what: each.speedup for each in changes(parts, trace.metadata["trained_with"])}


def _options_of(what: str) -> dict[str, str]:
    found = _MODE.search(what)
    if found is None:
        return {}
    overlap, every, compression = found.groups()
    named = {"overlap": overlap, "every": every, "compression": compression}
    return {name: value for name, value in named.items() if value}


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table. Return 1 if the promise of a case is off by more than 15 %."""
    parser = argparse.ArgumentParser(prog="python -m bench.advice", description="Check advice by measuring.")
    parser.add_argument(
        "--case", action="append", metavar="CLUSTER,MODEL,BATCH,OVERLAP", help="default: ten cases"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of each case (default: 3)")
    return status_of("bench.advice", partial(_measure, parser.parse_args(argv)))


def _measure(options: argparse.Namespace) -> int:
    cases: Sequence[tuple[str, str, int, str]] = CASES
    if options.rounds < 1:
        raise BenchError(f"--rounds should be at least 1. Received: {options.rounds}")
    if options.case:
        split = [text.split(",") for text in options.case]
        if not all(len(parts) == 4 and parts[2].isdecimal() and parts[3] in _EXACT for parts in split):
            raise BenchError(f"A case should be as 2x300mbit,mobilenetv2,8,none. Received: {options.case}")
        cases = tuple((parts[0], parts[1], int(parts[2]), parts[3]) for parts in split)
    rows = []
    for case in cases:
        rows.append(row(case, options.rounds))
        print(", ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ["hosts", "model, batch", "overlap", "step", "first advice", "promised", "measured", "off"]
    print(table(header, rows))
    offs = [abs(int(each[-1].rstrip("%"))) / 100 for each in rows if each[-1]]
    print(f"{sum(off <= _CLOSE for off in offs)} of {len(offs)} promises are within {_CLOSE:.0%}")
    return int(any(off > _CLOSE for off in offs))


if __name__ == "__main__":
    sys.exit(main())
