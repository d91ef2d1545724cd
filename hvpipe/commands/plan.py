"""`hvpipe plan`: cut a model into stages for a cluster."""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hvpipe.commands.terminal import has_colours
from hvpipe.config_file import MOST, short
from hvpipe.errors import HvpipeError, PlanError

if TYPE_CHECKING:
    from hvpipe.commands.plan_request import PlanRequest, PlanResult

_MARGIN_COLUMNS = 16
"""The columns for device names to the left of a timeline."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe plan`."""
    add = parser.add_argument
    add("profile", metavar="PROFILE", help="layer costs: JSON, or a PipeDream graph (.txt)")
    add("--cluster", required=True, metavar="FILE", help="devices and links: TOML or JSON")
    add("--stages", type=_whole, metavar="N", help="number of stages (default: the fastest)")
    add(
        "--microbatches",
        type=count_or_auto,
        metavar="M",
        help="micro-batches per step, at most 16,384, or auto: the fastest number for --batch-size "
        "(default: auto with --batch-size, else 8)",
    )
    add(
        "--schedule",
        default="auto",
        metavar="NAME",
        help="auto, gpipe, 1f1b, eager-1f1b, zb-h1 or interleaved (default: auto, the fastest)",
    )
    add(
        "--chunks", type=_whole, metavar="V", help="stages per device of an interleaved schedule (default: 2)"
    )
    recompute = parser.add_mutually_exclusive_group()
    recompute.add_argument(
        "--recompute",
        nargs="?",
        const="all",
        default="auto",
        choices=("auto", "all", "none"),
        metavar="auto|all|none",
        help="run forward passes again instead of keeping activations: in the stages that lack memory, in "
        "all (also without a value) or in none (default: auto)",
    )
    recompute.add_argument(
        "--recompute-stages",
        type=stage_numbers,
        metavar="N,N",
        help="recompute in the stages with these numbers",
    )
    add("--mode", default="auto", metavar="MODE", help="auto, data, pipeline or hybrid (default: auto)")
    add(
        "--method",
        default="search",
        metavar="NAME",
        help="search, greedy, exact, or a baseline: random, random_cuts, round_robin, even, pipedream, "
        "m_topo, m_etf (default: search)",
    )
    add("--seed", type=_whole, default=0, metavar="N", help="for random methods (default: 0)")
    add(
        "--batch-size",
        type=_whole,
        metavar="N",
        help="samples per step, at most 1,000,000,000 (default: micro-batches x samples of the profile)",
    )
    add("--graph-batch-size", type=_whole, metavar="N", help="samples of a PipeDream graph (default: 1)")
    add("-o", "--output", metavar="FILE", help="write the plan as JSON")
    add("--png", metavar="FILE", help="draw the timeline of the step as a picture")
    add("--explain", action="store_true", help="say why each cut is where it is")
    add("--json", action="store_true", help="print JSON")
    add("--no-baselines", action="store_true", help="print the plan only")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Make the plan, write the files and print the report. Returns the exit code.

    Raises PlanError if nothing fits; cli.py then exits with 1. plan/memory_shortage.py words it for mode
    "pipeline", plan_request.py for other modes.
    """
    # These need NumPy, which no other command needs.
    from hvpipe.commands.plan_report import is_pictured, title, to_json
    from hvpipe.commands.plan_request import make_plan
    from hvpipe.trace.chart import draw_timeline, draw_utilization, figure_class

    if options.png is not None:
        figure_class()  # before a long search
    try:
        result = make_plan(_request(options), with_baselines=not options.no_baselines)
    except HvpipeError as error:
        message = in_flags(str(error), options.batch_size is not None)
        raise (PlanError if isinstance(error, PlanError) else HvpipeError)(message) from error
    refused = {name: in_flags(why, options.batch_size is not None) for name, why in result.refused.items()}
    result = replace(result, refused=refused)
    # Files that are there stay as they are if this fails.
    if options.json:
        report = _json(to_json(result, explained=options.explain)) + "\n"
    else:
        report = _text(result, options, environ)
    if options.png is not None and is_pictured(result.chosen):
        draw_timeline(result.chosen.trace, options.png, title(result))
    elif options.png is not None:
        draw_utilization(result.chosen.utilization, options.png, title(result))
    if options.output is not None:
        result.chosen.plan.write(options.output)
    print(report, end="")
    return 0


def _request(options: argparse.Namespace) -> PlanRequest:
    from hvpipe.commands.plan_request import (
        PlanRequest,
        best_microbatches,
        check_chunks,
        of_microbatch,
        read_profile,
    )
    from hvpipe.search.options import PipeliningChoice
    from hvpipe.specs.cluster import Cluster

    _check_flags(options)
    recompute: Any = {"auto": "auto", "all": True, "none": False}[options.recompute]
    if options.recompute_stages is not None:
        recompute = options.recompute_stages
    cluster = Cluster.read(options.cluster)
    profiled = read_profile(options.profile, options.graph_batch_size)

    def request_with(microbatches: int) -> PlanRequest:
        if options.chunks is not None:
            check_chunks(options.chunks, len(profiled.layers))
        chunks = 2 if options.chunks is None else options.chunks
        pipelining = PipeliningChoice(options.schedule, microbatches, recompute, chunks)
        return PlanRequest(
            profile=of_microbatch(profiled, microbatches, options.batch_size),
            cluster=cluster,
            pipelining=pipelining,
            stages=options.stages,
            mode=options.mode,
            method=options.method,
            seed=options.seed,
            samples=options.batch_size,
        )

    wanted = options.microbatches
    if wanted is None:
        wanted = "auto" if options.batch_size is not None else 8
    if wanted != "auto":
        return request_with(wanted)
    if options.batch_size is None:
        raise HvpipeError("--microbatches auto needs --batch-size")
    return best_microbatches(request_with, options.batch_size)


def _check_flags(options: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, or that make no sense whatever the files are."""
    if options.chunks is not None:
        # Methods other than the search take the usual schedule for "auto".
        ways = ("auto", "interleaved") if options.method == "search" else ("interleaved",)
        if options.schedule not in ways:
            other = f"--method {options.method} " if options.schedule == "auto" else ""
            raise HvpipeError(
                "--chunks needs --schedule interleaved. "
                f"Received: {other}--schedule {options.schedule} --chunks {options.chunks}"
            )
        if options.mode == "data":
            raise HvpipeError(f"--chunks needs a pipeline. Received: --mode data --chunks {options.chunks}")
    wrong = [number for number in options.recompute_stages or () if number < 0]
    if wrong:
        raise HvpipeError(
            "--recompute-stages should have numbers of stages, from 0. "
            f"Received: --recompute-stages {wrong[0]}"
        )


def _json(report: Mapping[str, Any]) -> str:
    try:
        return json.dumps(report, indent=1, allow_nan=False)
    except ValueError as error:
        raise HvpipeError(f"Every figure of a report should be finite. Received: {error}") from error


def _text(result: PlanResult, options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    from hvpipe.commands.plan_report import to_text
    from hvpipe.trace.text_chart import draw

    columns = max(40, shutil.get_terminal_size((110, 24)).columns - _MARGIN_COLUMNS)
    colours = has_colours(environ)
    return to_text(result, lambda forecast: draw(forecast.trace, columns, colours), explained=options.explain)


def in_flags(message: str, has_batch_size: bool = False) -> str:
    """Write the remedies in a message as flags of the command instead of Python arguments.

    Args:
        message: The message.
        has_batch_size: Whether the command has `--batch-size`, so that micro-batches become smaller if they
            become more.
    """

    def smaller(found: re.Match[str]) -> str:
        batch = "" if has_batch_size else f"--batch-size {int(found[1]) * int(found[2])} "
        return f"{batch}--microbatches {found[1]}"

    def numbers(found: re.Match[str]) -> str:
        return "--recompute-stages " + ",".join(re.findall(r"\d+", found[1]))

    message = re.sub(r"(\d+) smaller micro-batches of (\d+) with", smaller, message)
    message = re.sub(r"recompute=\(([\d, ]+)\)", numbers, message)
    for python, flag in _FLAGS:
        message = re.sub(python, flag, message)
    return message


_FLAGS = (
    (
        r"\bstages=(\d+), schedule='([\w-]+)', microbatches=(\d+)",
        r"--stages \1 --schedule \2 --microbatches \3",
    ),
    (r"\bmethod='(\w+)';", r"--method \1;"),
    (r"^recompute should", "--recompute-stages should"),
    (r'schedule="([\w-]+)"', r"--schedule \1"),
    (r"recompute=True", "--recompute"),
    (r"(?<=with )(\d+) stages|(?<=or )(\d+) stages", r"--stages \1\2"),
    (r"(--stages \d+) and (\d+) micro-batches", r"\1 --microbatches \2"),
    (r"use partition for more", "use --method greedy for more"),
    (r"use another method", "use another --method"),
)

EPILOG = """examples:
  hvpipe plan profile.json --cluster cluster.toml
  hvpipe plan profile.json --cluster cluster.toml --batch-size 256 -o plan.json --png step.png
  hvpipe plan gnmt.txt --graph-batch-size 64 --cluster cluster.toml --mode pipeline --stages 4 --explain
docs/planning.md explains the files, the output and what a forecast assumes. exit codes: 0 success; 1 a file
cannot be read, no plan fits, or an option's value is refused; 2 other wrong usage"""


def stage_numbers(text: str) -> tuple[int, ...]:
    """Parse "0,2"."""
    return tuple(map(_whole, text.split(",")))


def count_or_auto(text: str) -> int | str:
    """Parse a number of micro-batches, or "auto"."""
    return text if text == "auto" else _whole(text)


def _whole(text: str) -> int:
    """Parse a whole number of at most MOST in size; 1e6 is one."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value) or (math.isfinite(value) and not value.is_integer()):
        raise argparse.ArgumentTypeError(f"should have whole numbers. Received: {short(text)}")
    if abs(value) > MOST:
        raise argparse.ArgumentTypeError(f"should be at most {MOST:g} in size. Received: {short(text)}")
    try:
        return int(text)
    except ValueError:
        return int(value)
