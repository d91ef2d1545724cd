"""Options that describe one task, for suites of a single group: `hvpipe bench step` and `tune`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from bench.errors import BenchError
from bench.evaluation.suite import ANYWHERE, Group, Suite
from bench.rounds.record import AUTO_THREADS, Task
from bench.training.workloads import WORKLOADS, check

_FIELDS = ("workload", "batch", "pixels", "warm_up", "steps", "seed", "epochs")


def add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what is trained and for how long, for suite_of."""
    parser.add_argument("--workload", default="resnet50", choices=list(WORKLOADS))
    parser.add_argument("--pixels", type=int, default=64, help="side of an image, or length of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="samples per rank and step (default: 8)")
    parser.add_argument("--shares", help="samples of each rank instead, e.g. 11,5")
    parser.add_argument("--ranks", type=int, help="ranks on this host alone (default: 2)")
    parser.add_argument("--warm-up", type=int, default=3, help="untimed steps of a round (default: 3)")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round (default: 8)")
    parser.add_argument("--epochs", type=int, default=0, help="instead of steps, of digits, prose or table")
    parser.add_argument("--seed", type=int, default=20)


def suite_of(name: str, options: argparse.Namespace, systems: Sequence[str], rounds: int) -> Suite:
    """Return the task of the options as a suite, with these systems in turn. BenchError for wrong options."""
    shares = options.shares.split(",") if options.shares else []
    if not all(word.strip().isdecimal() for word in shares):
        raise BenchError(f"--shares should be whole numbers, as in 11,5. Received: {options.shares!r}")
    values = {name: getattr(options, name) for name in _FIELDS}
    task = Task(threads=AUTO_THREADS, shares=tuple(map(int, shares)), **values)
    check(replace(task, threads=1))
    if rounds < 1:
        raise BenchError(f"--rounds should be at least 1. Received: --rounds {rounds}")
    group = Group(task, ANYWHERE, 1, tuple(systems), rounds)
    return Suite(name, f"{options.workload}, {len(systems)} in turn", (group,))
