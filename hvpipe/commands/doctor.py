"""`hvpipe doctor`: show what was built and found, what is missing and how to get it, here or on all hosts."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvpipe.commands import doctor_ranks, launch_options
from hvpipe.commands.doctor_checks import Finding, examine
from hvpipe.commands.supervise import Grace, supervise_job
from hvpipe.commands.terminal import has_colours
from hvpipe.environment.discover import discover
from hvpipe.errors import LaunchError

_TIMEOUT_S = 60
_COULD_NOT_START = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--all-hosts",
        action="store_true",
        help="compare all hosts of a job: those of --hosts, of a batch system's allocation, or of the ranks "
        "that mpirun or srun starts. Exit code 1: something matters; 2: the ranks could not be started",
    )
    launch_options.add_launch_options(parser, timeout_s=_TIMEOUT_S)


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the findings. Returns 0, or 1 if there is a problem; raises LaunchError."""
    if options.all_hosts:
        return _run_on_all_hosts(options, environ)
    if options.ranks is not None or options.hosts is not None or options.hostfile is not None:
        raise LaunchError("-np, --hosts and --hostfile are for hvpipe doctor --all-hosts")
    findings = examine(environ)
    if options.json:
        print(json.dumps(to_json(findings), indent=2))
    else:
        print(to_text(findings, colours=has_colours(environ)))
    return 0 if is_healthy(findings) else 1


def _run_on_all_hosts(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    launcher = discover(environ).launcher
    if launcher == "horovodrun":
        raise LaunchError(
            "hvpipe doctor --all-hosts compares hosts whose ranks MPI joins. Start it without horovodrun: "
            "hvpipe doctor --all-hosts --hosts a:4,b:4"
        )
    if launcher != "none":  # this process is a rank
        return int(doctor_ranks.print_hosts(as_json=options.json, colours=False))
    words = [*(["--json"] if options.json else []), *(["--colours"] if has_colours(environ) else [])]
    command = (sys.executable, "-u", "-m", "hvpipe.commands.doctor_ranks", *words)
    spec = launch_options.launch_spec(options, command, environ)
    settings = {"HVPIPE_TIMEOUT": f"{_TIMEOUT_S}", **launch_options.timeout_setting(options)}
    return launch_options.start(spec, settings, environ, dry_run=options.dry_run, supervised=_supervised)


def _supervised(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the ranks; hide what the launcher says about those that have found something."""
    with tempfile.TemporaryDirectory(prefix="hvpipe-doctor-") as folder:
        outcome = supervise_job(command, environ, Path(folder), Grace(), quiet=True)
    if outcome.code == doctor_ranks.DIFFERS:
        return 1
    if outcome.kept:
        print(outcome.kept, end="", file=sys.stderr, flush=True)
    return outcome.code if outcome.code == 0 or outcome.asked else _COULD_NOT_START


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
