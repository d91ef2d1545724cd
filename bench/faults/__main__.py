"""Runs trials of every fault and prints the table of docs/reliability.md: `python -m bench.faults`."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from bench.faults import soak
from bench.faults.cases import Fault, cases
from bench.faults.jobs import Trial
from bench.launch.termination import ended_by_exception


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if one did not end as it must."""
    known = cases()
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument(
        "--trials",
        type=int,
        default=5,
        metavar="N",
        help="of each fault; 5 N of `job` and `lost` (default: 5)",
    )
    parser.add_argument("--only", default=",".join(known), metavar="NAMES", help=f"of {', '.join(known)}")
    parser.add_argument("--seed", type=int, default=0, help="of ranks, steps and moments (default: 0)")
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="afterwards, break one job of 4 ranks for so long"
    )
    options = parser.parse_args(arguments)
    failed = False
    if options.trials:
        print("| fault | trials | as promised | hangs | seconds until the end, or lost | what must follow |")
        print("|---|---|---|---|---|---|", flush=True)
    for name in options.only.split(",") if options.trials else ():
        case = known[name]
        if case.missing:
            print(f"| {case.title} | 0 | {case.missing} | | | {case.promise} |", flush=True)
            continue
        trials = _trials(case, case.often * options.trials, random.Random(options.seed))
        failed = failed or any(trial.problem for trial in trials)
        print(_row(case, trials), flush=True)
    if options.soak is not None:
        with ended_by_exception():  # the folder of its jobs goes, too
            failed = bool(soak.run(options.soak, options.seed)) or failed
    return 1 if failed else 0


def _trials(case: Fault, count: int, chance: random.Random) -> list[Trial]:
    found = []
    for number in range(count):
        phase = case.phases[number % len(case.phases)]
        trial = case.run(phase, chance)
        if trial.problem:
            print(f"{case.title}, {phase}: {trial.problem}\n{trial.output}\n", file=sys.stderr, flush=True)
        found.append(trial)
    return found


def _row(case: Fault, trials: Sequence[Trial]) -> str:
    good = sum(not trial.problem for trial in trials)
    hangs = sum(trial.problem == "it hung" for trial in trials)
    after = [trial.after_s for trial in trials if trial.after_s > 0]
    seconds = f"{statistics.median(after):.1f}, at most {max(after):.1f}" if after else "-"
    return f"| {case.title} | {len(trials)} | {good} | {hangs} | {seconds} | {case.promise} |"


if __name__ == "__main__":
    sys.exit(main())
