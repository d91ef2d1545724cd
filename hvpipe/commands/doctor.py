"""`hvpipe doctor`: show what was built and found, what is missing and how to get it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvpipe.commands.doctor_checks import Finding, examine
from hvpipe.commands.terminal import has_colours


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the findings. Returns 0, or 1 if there is a problem."""
    findings = examine(environ)
    if options.json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        print(to_text(findings, colours=has_colours(environ)))
    return 0 if is_healthy(findings) else 1


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Tell whether no finding is a problem."""
    return all(finding.state != "problem" for finding in findings)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as JSON."""
    return {"ok": is_healthy(findings), "findings": [finding.to_json() for finding in findings]}


def to_text(findings: Sequence[Finding], colours: bool) -> str:
    """Return a table: mark, name, finding, and below them the advice."""
    marks = {"ok": ("ok", "32"), "absent": ("-", "2"), "problem": ("!!", "31")}
    lines = []
    for finding in findings:
        mark, colour = marks[finding.state]
        painted = f"\033[{colour}m{mark:<3}\033[0m" if colours else f"{mark:<3}"
        lines.append(f"{painted} {finding.name:<20} {finding.found}")
        if finding.advice:
            lines.append(f"{'':<24} -> {finding.advice}")
    problems = sum(finding.state == "problem" for finding in findings)
    lines.append("All is well." if not problems else f"Problems: {problems}.")
    return "\n".join(lines)
