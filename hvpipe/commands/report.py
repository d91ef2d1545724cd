"""`hvpipe report`: summarise a trace that `hvpipe run --trace` wrote."""

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
    trained_with = trace.metadata.get("trained_with")
    found = changes(parts, trained_with if isinstance(trained_with, dict) else {}) if parts else []
    if options.json:
        advice = {"step": asdict(parts), "changes": [asdict(each) for each in found]} if parts else {}
        print(json.dumps({**summary.to_json(), **advice}, indent=2))
        return 0
    print(summary.to_text())
    if parts:
        print(f"\n{describe(parts, found)}")
    return 0
