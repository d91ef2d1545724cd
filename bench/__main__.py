"""The command `hvpipe bench`, or `python -m bench`: run, step, tune, report, advise, readme.

Exit codes: 0 done; 1 some rounds failed or had no hosts; 2 wrong usage, or nothing could be run or read;
130 interrupted (128 + n: ended by signal n), with all finished rounds kept.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import ROOT, tune
from bench.command import add_hosts, status_of
from bench.errors import BenchError
from bench.evaluation.host_selection import HostSelection, chosen_hosts, this_host, virtual_clusters
from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.run import Evaluation, RunRound
from bench.evaluation.software import describe_software
from bench.evaluation.suite import Suite, add_task_arguments, read_suite, suite_names, suite_of_options
from bench.hosts.rank_benchmark import warn_if_busy
from bench.launch.termination import ended_by_exception
from bench.report import bars, modes, text
from bench.report.figures import all_figures
from bench.report.readme import rewrite
from bench.systems import SYSTEMS, System
from bench.systems.system import usual_python


def main(arguments: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    with ended_by_exception():
        return status_of(f"hvpipe bench {options.command}", partial(options.act, options), failed=2)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser; tests/bench/test_command.py freezes its flags."""
    parser = argparse.ArgumentParser(
        prog="hvpipe bench",
        description="Measure native TensorFlow, Horovod and hvpipe side by side.",
        epilog="exit codes: 0 done; 1 some rounds failed; 2 wrong usage, or nothing could be run or read; "
        "128 + n ended by signal n (130: Ctrl-C)",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="run a suite, or continue an interrupted one")
    run.add_argument("suite", metavar="SUITE", help=f"{', '.join(suite_names())}, or a TOML file")
    run.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: runs/bench-SUITE)")
    run.add_argument("--rounds", type=int, metavar="N", help="at most N rounds of each system")
    run.add_argument("--systems", metavar="NAMES", help="only these systems, as in single,hvpipe-step")
    run.add_argument("--retry-failed", action="store_true", help="run again the cases that failed in DIR")
    prints = run.add_mutually_exclusive_group()
    prints.add_argument("--plan", action="store_true", help="print what would run, and run nothing")
    step = commands.add_parser("step", help="measure the step of one task by several systems, in turn")
    step.add_argument(
        "--systems",
        metavar="NAMES",
        default="single,hvpipe-none,hvpipe-step",
        help="as in single,hvpipe-step (default: %(default)s)",
    )
    step.add_argument("--out", type=Path, metavar="DIR", help="also keep the results there")
    add_task_arguments(step)
    tune_ = commands.add_parser("tune", help="find the best settings of a tuned system")
    tune_.add_argument("--system", choices=list(tune.VALUES), required=True)
    tune_.add_argument("--keep", action="store_true", help="let the system run with the fastest from now on")
    add_task_arguments(tune_)
    for each in (run, step, tune_):
        add_hosts(each)
        each.add_argument("--threads", type=int, help="threads of an operation (default: cores / ranks)")
        each.add_argument(
            "--python", metavar="FILE", help="the Python that trains (default: .venv-peers' if there is one)"
        )
    report = commands.add_parser("report", help="print the figures of one or several folders")
    advise = commands.add_parser("advise", help="say which mode to use, and what each would gain at best")
    readme = commands.add_parser("readme", help="put the comparison into bench/README.md")
    readme.add_argument("--file", type=Path, default=ROOT / "bench" / "README.md", help="another file")
    for each in (advise, readme):
        each.add_argument("folder", type=Path, metavar="DIR", help="results.jsonl, or its folder")
    several = "results.jsonl, or its folder; several if their cases differ"
    report.add_argument("folders", type=Path, metavar="DIR", nargs="+", help=several)
    report.add_argument("--plot", type=Path, metavar="FILE", help="also draw the steps: a .svg or .png file")
    for one in (prints, step, tune_, report, advise):
        one.add_argument("--json", action="store_true", help="print the figures as JSON")
    acts = {run: _run, step: _step, tune_: _tune, report: _report, advise: _advise, readme: _readme}
    for each, act in acts.items():
        each.set_defaults(act=act)
    return parser


def _run(options: argparse.Namespace) -> int:
    selection = chosen_hosts(options.cluster, options.hosts) or virtual_clusters()
    suite = read_suite(options.suite, tuple(SYSTEMS))
    if options.systems is not None:
        suite = suite.only_systems(name.strip() for name in options.systems.split(","))
    if options.rounds is not None:
        suite = suite.at_most(options.rounds)
    evaluation = _evaluation(suite, selection, options, SYSTEMS)
    if options.plan:
        print(evaluation.describe())
        return 0
    folder = Path("runs") / f"bench-{suite.name}" if options.out is None else options.out
    outcome = _measured(evaluation, folder, retry_failed=options.retry_failed)
    status = _finish(outcome, options.json)
    if any(each.error for each in outcome.rounds):
        print(
            "the same command does not run failed cases again, but with --retry-failed it does",
            file=sys.stderr,
        )
    return status


def _step(options: argparse.Namespace) -> int:
    names = [name.strip() for name in options.systems.split(",")]
    return _finish(_one_group(options, names, SYSTEMS, options.out), options.json)


def _tune(options: argparse.Namespace) -> int:
    variants = tune.variants(options.system)
    outcome = _one_group(options, list(variants), variants, None)
    if (status := _finish(outcome, options.json)) == 0:
        best = min(all_figures(outcome), key=lambda row: row.step_s)
        print(f"fastest: {best.case.system}", file=sys.stderr)
        if options.keep:
            place = outcome.setting.cluster(best.case.cluster).description
            tune.keep(options.system, best, place, options.rounds)
    return status


def _one_group(
    options: argparse.Namespace, names: Sequence[str], systems: Mapping[str, System], folder: Path | None
) -> EvaluationOutcome:
    """Train the task of the options by the named systems in turn. Without a folder nothing is kept."""
    selection = chosen_hosts(options.cluster, options.hosts)
    if selection is None:
        ranks = 2 if options.ranks is None else options.ranks
        if ranks < 1:
            raise BenchError(f"--ranks should be at least 1. Received: --ranks {ranks}")
        selection = this_host(ranks)
    elif options.ranks is not None:
        raise BenchError(
            "--ranks are those of this host alone; a cluster has as many as its slots. "
            f"Received: --ranks {options.ranks} with --hosts or --cluster"
        )
    suite = suite_of_options(options, names, list(systems))
    evaluation = _evaluation(suite, selection, options, systems)
    warn_if_busy()
    if folder is not None:
        return _measured(evaluation, folder, retry_failed=True)
    with TemporaryDirectory(prefix="hvpipe-bench-") as kept:
        return evaluation.run(Path(kept))


def _evaluation(
    suite: Suite, selection: HostSelection, options: argparse.Namespace, systems: Mapping[str, System]
) -> Evaluation:
    """Return the evaluation of a suite on these hosts, under the Python of the options."""
    from bench.rounds.round import run_round

    if options.threads is not None and options.threads < 1:
        raise BenchError(f"--threads should be at least 1. Received: --threads {options.threads}")
    python = _python(options.python)
    suite = selection.fit(suite).with_threads(
        options.threads, lambda group: selection.hosts_of(group).cores_of_rank()
    )
    used = {name for group in suite.groups for name in group.systems}
    missing = {
        name: f"{each.title}: {why}"
        for name, each in systems.items()
        if name in used and (why := each.missing(python))
    }
    if used == missing.keys():
        raise BenchError(
            f"At least one of the systems should be installed. Received: {'; '.join(missing.values())}"
        )
    print(suite.title, file=sys.stderr)
    run: RunRound = partial(run_round, python=python, systems=systems)
    return Evaluation(suite, selection, run, missing, describe_software(python))


def _measured(evaluation: Evaluation, folder: Path, *, retry_failed: bool) -> EvaluationOutcome:
    try:
        return evaluation.run(folder, retry_failed=retry_failed)
    except (KeyboardInterrupt, SystemExit):
        print("interrupted; finished rounds are kept: the same command continues from there", file=sys.stderr)
        raise


def _python(given: str | None) -> str:
    """Return the absolute path of the Python that trains: --python, or the usual one."""
    python = given or usual_python()
    found = shutil.which(python)
    if found is None:
        raise BenchError(f"--python should be a Python that runs. Received: {python!r}")
    return os.path.abspath(found)  # links are not followed: a virtual environment is where its link is


def _report(options: argparse.Namespace) -> int:
    outcome = EvaluationOutcome.joined([EvaluationOutcome.read(folder) for folder in options.folders])
    if options.plot is not None:
        bars.draw(outcome, options.plot)
    return _finish(outcome, options.json)


def _finish(outcome: EvaluationOutcome, as_json: bool) -> int:
    """Print the figures. Return the exit code."""
    print(text.to_json(outcome) if as_json else text.to_text(outcome))
    return int(any(each.error or each.not_up for each in outcome.rounds))


def _advise(options: argparse.Namespace) -> int:
    groups = modes.of_groups(all_figures(EvaluationOutcome.read(options.folder)))
    if not groups:
        raise BenchError(
            "Advice needs rounds of single and hvpipe-step on links with a known rate. Received: none"
        )
    as_json = {name: [vars(each) for each in found] for name, found in groups.items()}
    print(json.dumps(as_json, indent=1) if options.json else modes.describe(groups))
    return 0


def _readme(options: argparse.Namespace) -> int:
    print(f"{options.file}: {rewrite(options.file, EvaluationOutcome.read(options.folder))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
