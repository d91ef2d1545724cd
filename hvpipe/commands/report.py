"""`hvpipe report`: summarise a trace that `hvpipe run --trace` wrote."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping

from hvpipe.trace.events import Trace
from hvpipe.trace.run_report import summarise_trace


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe report`."""
    parser.add_argument("trace", help="the trace file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the summary. Returns the exit code; raises HvpipeError if the file is not a trace."""
    summary = summarise_trace(Trace.read(options.trace))
    print(json.dumps(summary.to_json(), indent=2) if options.json else summary.to_text())
    return 0
