"""The command `hvpipe`: run, top, doctor, report, profile, plan, bench.

Exit codes: 0 all is well; 1 `doctor` found a problem, `top` found no job, a file cannot be read, or `plan`
found nothing that fits or refuses an option's value; 2 other wrong usage, or the run could not be started, or
`profile` found no model that it can measure; otherwise `run` and `profile` return what mpirun returned,
128 + n after signal n. `bench` has codes of its own: 1 where rounds failed or `compare` found a regression.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvpipe import __version__
from hvpipe.comm.discover import live_folder
from hvpipe.commands import bench as bench_command
from hvpipe.commands import doctor, launch_options
from hvpipe.commands import profile as profile_command
from hvpipe.commands import top as top_command
from hvpipe.commands.launch_options import add_launch_options
from hvpipe.errors import HvpipeError, LaunchError
from hvpipe.trace import run_report as report
from hvpipe.trace.events import Trace

_EPILOG = """exit codes: 0 ok; 1 doctor found a problem, top found no job, report or plan cannot read a file,
or plan found nothing that fits or refuses an option's value; 2 other wrong usage, the run could not be
started, or profile found no model that it can measure; otherwise run and profile return mpirun's exit code,
128 + n after signal n"""

# As in the names "python3" and "python3.11".
_VERSIONS = (str(sys.version_info.major), f"{sys.version_info.major}.{sys.version_info.minor}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    try:
        if options.command == "run":
            return _run(options, os.environ)
        if options.command == "profile":
            return profile_command.profile(options, os.environ)
        if options.command == "doctor":
            return _doctor(options, os.environ)
        if options.command == "plan":
            return _plan(options, os.environ)
        if options.command == "bench":
            bench_command.bench((options.subcommand, *options.arguments), os.environ)
        if options.command == "top":
            return top_command.top(options, live_folder(os.environ), _has_colours(os.environ))
        return _report(options)
    except HvpipeError as error:
        print(f"hvpipe {options.command}: {error}", file=sys.stderr)
        return 2 if options.command in ("run", "profile", "bench") else 1


def make_parser() -> argparse.ArgumentParser:
    """The whole command line; tests/test_cli.py freezes its flags."""
    parser = argparse.ArgumentParser(
        prog="hvpipe", description="Train Keras models across MPI ranks.", epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"hvpipe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_run(commands.add_parser("run", help="start a Python script on several ranks", epilog=_EPILOG))
    top_command.add_top_options(
        commands.add_parser("top", help="watch all ranks of a running job", epilog=_EPILOG)
    )
    examine = commands.add_parser(
        "doctor", help="what was built and found, what is missing and how to get it"
    )
    examine.add_argument("--json", action="store_true", help="as JSON")
    summarise = commands.add_parser("report", help="sum up a trace that `hvpipe run --trace` wrote")
    summarise.add_argument("trace", help="the trace file")
    summarise.add_argument("--json", action="store_true", help="as JSON")
    profile_command.add_profile_options(
        commands.add_parser("profile", help="measure a model's layers, the devices and links", epilog=_EPILOG)
    )
    _add_plan(commands.add_parser("plan", help="cut a model into stages for a cluster", epilog=_EPILOG))
    measure = commands.add_parser(
        "bench",
        help="measure native TensorFlow, Horovod and hvpipe side by side",
        epilog="run quick, run full, report DIR, compare BEFORE AFTER, readme DIR; each has --help",
    )
    measure.add_argument("subcommand", metavar="COMMAND", choices=("run", "report", "compare", "readme"))
    measure.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    add_launch_options(run, timeout_s=300)
    run.add_argument("--trace", metavar="FILE", help="write one timeline of all ranks, for ui.perfetto.dev")
    run.add_argument("--utilization", metavar="FILE", help="write samples of CPU and GPU utilization")
    run.add_argument("--utilization-hz", type=float, metavar="HZ", help="samples a second (default: 10)")
    run.add_argument("--no-summary", action="store_true", help="no summary at the end")
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    run.add_argument("script", metavar="SCRIPT", help="the Python script, or python and the script")
    run.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("profile", metavar="PROFILE", help="layer costs: JSON, or a PipeDream graph (.txt)")
    plan.add_argument("--cluster", required=True, metavar="FILE", help="devices and links: TOML or JSON")
    plan.add_argument("--stages", type=int, metavar="N", help="stages (default: what is fastest)")
    plan.add_argument(
        "--microbatches",
        type=_count_or_auto,
        default=8,
        metavar="M",
        help="micro-batches of a step, or auto: what is fastest for --batch-size (default: 8)",
    )
    plan.add_argument(
        "--schedule", default="1f1b", metavar="NAME", help="gpipe, 1f1b, zb-h1 or interleaved (default: 1f1b)"
    )
    plan.add_argument("--chunks", type=int, metavar="V", help="stages on each device, if interleaved")
    again = plan.add_mutually_exclusive_group()
    again.add_argument("--recompute", action="store_true", help="run forwards again instead of stashing them")
    again.add_argument(
        "--recompute-stages",
        type=_numbers,
        metavar="N,N",
        help="the same, in the stages of these numbers",
    )
    plan.add_argument(
        "--mode",
        default="pipeline",
        metavar="MODE",
        help="auto, data, pipeline (default) or hybrid",
    )
    plan.add_argument(
        "--method", default="greedy", metavar="NAME", help="greedy, exact or a baseline (default: greedy)"
    )
    plan.add_argument("--seed", type=int, default=0, metavar="N", help="for the random methods (default: 0)")
    plan.add_argument("--batch-size", type=int, metavar="N", help="samples of a step (default: as profiled)")
    plan.add_argument(
        "--graph-batch-size", type=int, metavar="N", help="samples that a PipeDream graph is of (default: 1)"
    )
    plan.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    plan.add_argument("--png", metavar="FILE", help="draw the step as a picture")
    plan.add_argument("--explain", action="store_true", help="say why each cut is where it is")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.add_argument("--no-baselines", action="store_true", help="the plan alone")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _plan(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    # Brings in NumPy, which no other command needs.
    from hvpipe.commands import plan as plan_command
    from hvpipe.commands import plan_report
    from hvpipe.plan.pipelining import Pipelining
    from hvpipe.specs.cluster import Cluster
    from hvpipe.trace.chart import draw_timeline
    from hvpipe.trace.text_chart import draw

    usual = 2 if options.schedule == "interleaved" else 1
    chunks = usual if options.chunks is None else options.chunks
    cluster = Cluster.read(options.cluster)

    def ask(microbatches: int) -> plan_command.Question:
        again = options.recompute or options.recompute_stages or False
        pipelining = Pipelining(options.schedule, microbatches, again, chunks)
        profile = plan_command.read_profile(
            options.profile, microbatches, options.batch_size, options.graph_batch_size
        )
        asked = (options.stages, options.mode, options.method, options.seed)
        return plan_command.Question(profile, cluster, pipelining, *asked, samples=options.batch_size)

    if options.microbatches != "auto":
        question = ask(options.microbatches)
    elif options.batch_size is not None:
        question = plan_command.finest(ask, options.batch_size)
    else:
        raise HvpipeError("--microbatches auto needs to know the --batch-size. Received: none")
    given = plan_command.answer(question, with_baselines=not options.no_baselines)
    if options.output is not None:
        given.chosen.plan.write(options.output)
    if options.png is not None:
        draw_timeline(given.chosen.trace, options.png, plan_report.title(given))
    if options.json:
        print(json.dumps(plan_report.to_json(given, explained=options.explain), indent=1))
        return 0
    columns = max(40, shutil.get_terminal_size((120, 24)).columns - 16)
    colours = _has_colours(environ)
    text = plan_report.to_text(
        given, lambda one: draw(one.trace, columns, colours), explained=options.explain
    )
    print(text, end="")
    return 0


def _run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    spec = launch_options.launch_spec(options, _rank_command(options), environ)
    return launch_options.start(spec, _settings(options), environ, dry_run=options.dry_run)


def _rank_command(options: argparse.Namespace) -> tuple[str, ...]:
    """What each rank runs: `python train.py`, as mpirun takes it, is the same as `train.py`."""
    words = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if options.module:
        return (sys.executable, "-u", "-m", options.script, *words)
    if not _is_python(options.script):
        words = [options.script, *words]
    # What begins with a dash is an option for Python itself.
    if not words or not (words[0].startswith("-") or Path(words[0]).is_file()):
        raise LaunchError(f"The script should be a file. Received: script={(words or [''])[0]!r}")
    return (sys.executable, "-u", *words)


def _is_python(word: str) -> bool:
    """Whether this names the Python that runs, and no script; LaunchError where it names another one."""
    path = Path(word)
    version = re.fullmatch(r"python((?:\d+(?:\.\d+)?)?)", path.name)
    if version is None or (path.name == word and path.is_file()):
        return False
    beside = path.name == word or path.parent.resolve() == Path(sys.executable).parent.resolve()
    if not beside or version[1] not in ("", *_VERSIONS):
        raise LaunchError(
            "Scripts run on the Python that hvpipe is installed in: leave it away, or use the hvpipe of the "
            f"other. Received: {word}, and hvpipe in {sys.executable}"
        )
    return True


def _settings(options: argparse.Namespace) -> dict[str, str]:
    """The HVPIPE_* variables that say to the ranks what the options say."""
    settings = launch_options.timeout_setting(options)
    for variable, option, value in (
        ("HVPIPE_TRACE", "--trace", options.trace),
        ("HVPIPE_UTILIZATION", "--utilization", options.utilization),
    ):
        if value is not None:
            settings[variable] = launch_options.output_path(option, value)
    if options.utilization_hz is not None:
        hz = options.utilization_hz
        if not (math.isfinite(hz) and hz > 0):
            raise LaunchError(f"--utilization-hz should be a positive number. Received: {hz}")
        settings["HVPIPE_UTILIZATION_HZ"] = f"{hz:g}"
    if not options.no_summary:
        settings["HVPIPE_SUMMARY"] = "1"
    return settings


def _doctor(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    findings = doctor.examine(environ)
    if options.json:
        print(json.dumps(doctor.to_json(findings), indent=2))
    else:
        print(doctor.to_text(findings, colours=_has_colours(environ)))
    return 0 if doctor.is_healthy(findings) else 1


def _has_colours(environ: Mapping[str, str]) -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in environ


def _report(options: argparse.Namespace) -> int:
    summary = report.summarise_trace(Trace.read(options.trace))
    print(json.dumps(summary.to_json(), indent=2) if options.json else summary.to_text())
    return 0
