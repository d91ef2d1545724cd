"""The command `hvpipe bench`, or `python -m bench`: run, report, advise, compare, readme.

Exit codes: 0 done; 1 some rounds failed or had no hosts, or `compare` found a regression; 2 wrong usage, or
nothing could be run or read; 130 interrupted (128 + n: ended by signal n), with all finished rounds kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.cluster.named_clusters import cluster_spec, cores_of_rank
from bench.errors import ClusterError
from bench.evaluation.host_selection import HostSelection, one_cluster, select_hosts
from bench.evaluation.journal import Journal, JournalError
from bench.evaluation.outcome import EvaluationOutcome, OutcomeError
from bench.evaluation.progress import format_left, shown
from bench.evaluation.read_suite import read_suite, suite_names
from bench.evaluation.run import Evaluation, RunRound
from bench.evaluation.software import describe_software
from bench.evaluation.suite import Group, SuiteError
from bench.launch.termination import ended_by_exception
from bench.report import modes
from bench.report.compare import compare
from bench.report.figures import all_figures
from bench.report.files import show_figures, write_outputs
from bench.report.readme import ReadmeError, rewrite
from hvpipe.errors import HvpipeError

_ROOT = Path(__file__).parents[1]


class UsageError(ValueError):
    """Raised for a command line that cannot be followed."""


_TOLD = (ClusterError, HvpipeError, JournalError, OSError, OutcomeError, ReadmeError, SuiteError, UsageError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = make_parser().parse_args(arguments)
    try:
        with ended_by_exception():
            status: int = options.act(options)
        return status
    except _TOLD as error:
        print(f"hvpipe bench {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; tests/bench/test_command.py freezes its flags."""
    parser = argparse.ArgumentParser(
        prog="hvpipe bench",
        description="Measure native TensorFlow, Horovod and hvpipe side by side.",
        epilog="exit codes: 0 done; 1 some rounds failed, or compare found a regression; "
        "2 wrong usage, or nothing could be run or read; 128 + n ended by signal n (130: Ctrl-C)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a suite, or continue an interrupted one")
    run.add_argument("suite", metavar="SUITE", help=f"{', '.join(suite_names())}, or a TOML file")
    run.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: runs/bench-SUITE)")
    run.add_argument("--hosts", metavar="LIST", help="real hosts, as in a:2,b:2, instead of virtual clusters")
    run.add_argument(
        "--host-counts", metavar="LIST", help="also run on only the first hosts of --hosts, as in 1,2"
    )
    run.add_argument(
        "--cluster",
        metavar="NAME",
        help="one virtual cluster for all: 2x1.5gbit, slow-cpu, or a TOML file",
    )
    run.add_argument("--rounds", type=int, metavar="N", help="at most N rounds of each system")
    run.add_argument("--systems", metavar="NAMES", help="only these systems, as in single,hvpipe-step")
    run.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of an operation (default: the suite's, or cores / ranks)",
    )
    run.add_argument(
        "--python", metavar="FILE", help="the Python that trains (default: .venv-peers' if there is one)"
    )
    run.add_argument("--retry-failed", action="store_true", help="run again the cases that failed in DIR")
    run.add_argument("--plan", action="store_true", help="print what would run and how long, and run nothing")
    run.add_argument("--json", action="store_true", help="print the figures, or the plan, as JSON")
    run.set_defaults(act=_run)
    report = commands.add_parser("report", help="write the report, CSV and JSON of a folder again")
    report.add_argument("folder", type=Path, metavar="DIR", help="a folder that `run` wrote")
    report.add_argument("--json", action="store_true", help="print the figures as JSON")
    report.set_defaults(act=_report)
    advise = commands.add_parser("advise", help="say which mode to use, and what each would gain at best")
    advise.add_argument("folder", type=Path, metavar="DIR", help="results.json, or its folder")
    advise.add_argument("--json", action="store_true", help="as JSON")
    advise.set_defaults(act=_advise)
    versus = commands.add_parser("compare", help="find what became slower beyond noise")
    versus.add_argument("before", type=Path, metavar="BEFORE", help="results.json, or its folder")
    versus.add_argument("after", type=Path, metavar="AFTER", help="results.json, or its folder")
    versus.add_argument("--json", action="store_true", help="as JSON")
    versus.set_defaults(act=_compare)
    readme = commands.add_parser("readme", help="put the comparison into bench/README.md")
    readme.add_argument("results", type=Path, metavar="DIR", help="results.json, or its folder")
    readme.add_argument(
        "--file", type=Path, default=_ROOT / "bench" / "README.md", metavar="FILE", help="another file"
    )
    readme.set_defaults(act=_readme)
    return parser


def _run(options: argparse.Namespace) -> int:
    from bench.rounds.round import run_round
    from bench.systems import SYSTEMS

    if options.hosts is not None and options.cluster is not None:
        raise UsageError(f"Give --hosts or --cluster. Received: {options.hosts!r} and {options.cluster!r}")
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads should be at least 1. Received: --threads {options.threads}")
    python = _python(options.python)
    suite = read_suite(options.suite, tuple(SYSTEMS))
    if options.systems is not None:
        suite = suite.only_systems(name.strip() for name in options.systems.split(","))
    if options.rounds is not None:
        suite = suite.at_most(options.rounds)
    missing = {
        name: f"{each.title}: {why}" for name, each in SYSTEMS.items() if (why := each.missing(python))
    }
    run: RunRound = partial(run_round, python=python)
    selection = select_hosts(options.hosts) if options.cluster is None else one_cluster(options.cluster)
    if options.host_counts is not None:
        selection = selection.on_counts(options.host_counts)
    suite = selection.fit(suite).with_threads(options.threads, partial(_cores, selection))
    evaluation = Evaluation(suite, selection, run, missing, describe_software(python))
    print(f"{suite.title}\nabout {format_left(evaluation.estimate_s())}", file=sys.stderr)
    if options.plan:
        print(json.dumps(evaluation.plan(), indent=1) if options.json else evaluation.describe())
        return 0
    _require_plots()
    folder = Path("runs") / f"bench-{suite.name}" if options.out is None else options.out
    try:
        with shown(evaluation.estimate_s()) as progress:
            outcome = evaluation.run(folder, progress, retry_failed=options.retry_failed)
    except (KeyboardInterrupt, SystemExit):
        print("interrupted; finished rounds are kept: the same command continues from there", file=sys.stderr)
        raise
    status = _finish(outcome, folder, options.json)
    if any(each.error for each in (*outcome.rounds, *outcome.pipelines)):
        print(
            "the same command does not run failed cases again, but with --retry-failed it does",
            file=sys.stderr,
        )
    if not outcome.pipelines and all(each.skipped and not each.not_up for each in outcome.rounds):
        raise UsageError("One of the suite's systems at least should be installed. Received: none")
    return status


def _cores(selection: HostSelection, group: Group) -> float:
    """Return the cores of each rank of a group."""
    if selection.hosts is not None:
        return selection.hosts.cores_of_rank()
    cores = os.cpu_count() or 1
    return (
        cores / group.ranks
        if selection.loopback
        else cores_of_rank(group.spec or cluster_spec(group.cluster), cores)
    )


def _python(given: str | None) -> str:
    """Return the absolute path of the Python that trains.

    It is --python, else the one of `make peers`, in which every system runs on the same TensorFlow, else this
    one.
    """
    peers = _ROOT / ".venv-peers" / "bin" / "python"
    python = given or (str(peers) if peers.exists() else sys.executable)
    found = shutil.which(python)
    if found is None:
        raise UsageError(f"--python should be a Python that runs. Received: {python!r}")
    return os.path.abspath(found)  # links are not followed: a virtual environment is where its link is


def _require_plots() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("The report needs matplotlib: `pip install '.[bench]'`. Received: not installed")


def _report(options: argparse.Namespace) -> int:
    _require_plots()
    if not options.folder.is_dir():
        raise UsageError(f"DIR should be a folder that `run` wrote. Received: {options.folder}")
    return _finish(_read(options.folder), options.folder, options.json)


def _read(path: Path) -> EvaluationOutcome:
    """Read a folder's journal, which may be newer than its results.json; else a file of results."""
    kept = Journal.kept_in(path) if path.is_dir() else None
    return EvaluationOutcome.read(path) if kept is None else kept


def _finish(outcome: EvaluationOutcome, folder: Path, as_json: bool) -> int:
    written = write_outputs(outcome, folder)
    print(show_figures(outcome, as_json=as_json))
    print(f"written: {', '.join(str(path) for path in written)}", file=sys.stderr)
    failed = any(each.error for each in (*outcome.rounds, *outcome.pipelines))
    return 1 if failed or any(each.not_up for each in outcome.rounds) else 0


def _advise(options: argparse.Namespace) -> int:
    rows = all_figures(_read(options.folder))
    text = json.dumps(modes.as_json(rows), indent=1) if options.json else modes.describe(rows)
    if not text:
        raise UsageError(
            "Advice needs rounds of single and hvpipe-step on links with a known rate. Received: none"
        )
    print(text)
    return 0


def _compare(options: argparse.Namespace) -> int:
    found = compare(_read(options.before), _read(options.after))
    print(json.dumps(found.to_json(), indent=1) if options.json else found.to_text())
    return 1 if found.regressed else 0


def _readme(options: argparse.Namespace) -> int:
    print(f"{options.file}: {rewrite(options.file, _read(options.results))}")
    return 0
