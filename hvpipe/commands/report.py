"""`hvpipe report`: summarise a trace of `hvpipe run --trace`, and say what would make steps shorter."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict

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
    found = changes(parts, trace.metadata.get("trained_with")) if parts else []
    if options.json:
        step = {**asdict(parts), "step_s": parts.step_s} if parts else None
        advice = {"step": step, "changes": [asdict(each) for each in found]}
        print(json.dumps({**summary.to_json(), "advice": advice}, indent=2))
        return 0
    print(summary.to_text())
    if parts:
        print(f"\n{describe(parts, found)}")
    return 0
