"""`hvpipe blackbox`: what ended a job, from the flight recorders of its ranks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from hvpipe.blackbox import story


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe blackbox`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="what `hvpipe run --flight-recorder DIR` wrote; its newest start is read",
    )
    parser.add_argument("--json", action="store_true", help="print all events as JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what happened. Return 0, or 1 if no recorder can be read.

    Raises:
        HvpipeError: The folder has no recorder.
    """
    records = story.read_records(options.folder)
    print(json.dumps(story.document(records), indent=1) if options.json else story.to_text(records))
    return 0 if records.flights else 1
