"""`hvpipe report`: summarise a trace of `hvpipe run --trace`, and say what would make steps shorter."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hvpipe.trace.advice import changes, describe, step_parts
from hvpipe.trace.events import Trace
from hvpipe.trace.run_report import summarise_trace


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe report`."""
    parser.add_argument("trace", help="the trace file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the summary. Returns the exit code; raises HvpipeError if the file is not a trace."""
    trace = Trace.read(options.trace)
    summary, parts = summarise_trace(trace), step_parts(trace)
    if isinstance(parts, str):
        advice: dict[str, Any] = {"step": None, "changes": [], "why_not": parts}
        advised = f"no advice: {parts}"
    else:
        found = changes(parts, trace.metadata.get("trained_with"))
        step = {**asdict(parts), "step_s": parts.step_s}
        advice = {"step": step, "changes": [asdict(each) for each in found], "why_not": None}
        advised = describe(parts, found)
    if options.json:
        print(json.dumps({**summary.to_json(), "advice": advice}, indent=2))
    else:
        print(f"{summary.to_text()}\n\n{advised}")
    return 0
