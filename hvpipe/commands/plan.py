"""`hvpipe plan`: cut a model into stages for a cluster."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvpipe.commands.terminal import has_colours
from hvpipe.errors import HvpipeError

if TYPE_CHECKING:
    from hvpipe.commands.plan_request import PlanRequest, PlanResult

_MARGIN_COLUMNS = 16
"""The columns for device names to the left of a timeline."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe plan`."""
    parser.add_argument("profile", metavar="PROFILE", help="layer costs: JSON, or a PipeDream graph (.txt)")
    parser.add_argument("--cluster", required=True, metavar="FILE", help="devices and links: TOML or JSON")
    parser.add_argument("--stages", type=int, metavar="N", help="number of stages (default: the fastest)")
    parser.add_argument(
        "--microbatches",
        type=_count_or_auto,
        default=8,
        metavar="M",
        help="micro-batches per step, or auto: the fastest number for --batch-size (default: 8)",
    )
    parser.add_argument(
        "--schedule", default="1f1b", metavar="NAME", help="gpipe, 1f1b, zb-h1 or interleaved (default: 1f1b)"
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="stages per device of an interleaved schedule"
    )
    recompute = parser.add_mutually_exclusive_group()
    recompute.add_argument(
        "--recompute", action="store_true", help="run forward passes again instead of keeping activations"
    )
    recompute.add_argument(
        "--recompute-stages",
        type=_numbers,
        metavar="N,N",
        help="the same, only in the stages with these numbers",
    )
    parser.add_argument(
        "--mode",
        default="pipeline",
        metavar="MODE",
        help="auto, data, pipeline or hybrid (default: pipeline)",
    )
    parser.add_argument(
        "--method", default="greedy", metavar="NAME", help="greedy, exact or a baseline (default: greedy)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for random methods (default: 0)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per step (default: as profiled)")
    parser.add_argument(
        "--graph-batch-size", type=int, metavar="N", help="samples that a PipeDream graph is for (default: 1)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON")
    parser.add_argument("--png", metavar="FILE", help="draw the timeline of the step as a picture")
    parser.add_argument("--explain", action="store_true", help="say why each cut is where it is")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-baselines", action="store_true", help="print the plan only")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Make the plan, write the files and print the report. Returns the exit code.

    Raises PlanError if nothing fits; cli.py then exits with 1. plan/memory_shortage.py words it for mode
    "pipeline", plan_request.py for other modes.
    """
    # These need NumPy, which no other command needs.
    from hvpipe.commands.plan_report import title, to_json
    from hvpipe.commands.plan_request import make_plan
    from hvpipe.trace.chart import draw_timeline

    result = make_plan(_request(options), with_baselines=not options.no_baselines)
    if options.output is not None:
        result.chosen.plan.write(options.output)
    if options.png is not None:
        draw_timeline(result.chosen.trace, options.png, title(result))
    if options.json:
        print(json.dumps(to_json(result, explained=options.explain), indent=1))
    else:
        print(_text(result, options, environ), end="")
    return 0


def _request(options: argparse.Namespace) -> PlanRequest:
    from hvpipe.commands.plan_request import PlanRequest, read_profile, with_best_microbatches
    from hvpipe.plan.pipelining import Pipelining
    from hvpipe.specs.cluster import Cluster

    default_chunks = 2 if options.schedule == "interleaved" else 1
    chunks = default_chunks if options.chunks is None else options.chunks
    recompute = options.recompute or options.recompute_stages or False
    cluster = Cluster.read(options.cluster)

    def request_with(microbatches: int) -> PlanRequest:
        return PlanRequest(
            profile=read_profile(options.profile, microbatches, options.batch_size, options.graph_batch_size),
            cluster=cluster,
            pipelining=Pipelining(options.schedule, microbatches, recompute, chunks),
            stages=options.stages,
            mode=options.mode,
            method=options.method,
            seed=options.seed,
            samples=options.batch_size,
        )

    if options.microbatches != "auto":
        return request_with(options.microbatches)
    if options.batch_size is None:
        raise HvpipeError("--microbatches auto needs --batch-size. Received: no --batch-size")
    return with_best_microbatches(request_with, options.batch_size)


def _text(result: PlanResult, options: argparse.Namespace, environ: Mapping[str, str]) -> str:
    from hvpipe.commands.plan_report import to_text
    from hvpipe.trace.text_chart import draw

    columns = max(40, shutil.get_terminal_size((120, 24)).columns - _MARGIN_COLUMNS)
    colours = has_colours(environ)
    return to_text(result, lambda forecast: draw(forecast.trace, columns, colours), explained=options.explain)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)
