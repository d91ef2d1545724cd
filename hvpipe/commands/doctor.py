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
        "that mpirun or srun starts. Exit code 1: something matters; 2: the ranks did not start, or failed",
    )
    launch_options.add_launch_options(parser, timeout_s=_TIMEOUT_S)


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the findings. Returns 0, or 1 if there is a problem; raises LaunchError."""
    if options.all_hosts:
        return _run_on_all_hosts(options, environ)
    if given := launch_options.given(options):
        raise LaunchError(f"Only hvpipe doctor --all-hosts takes {', '.join(given)}")
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
        if given := launch_options.given(options):
            raise LaunchError(
                f"This is a rank that {launcher} has started, where {', '.join(given)} would come too late. "
                f"Give {launcher} its own options, and set HVPIPE_NET, HVPIPE_PORTS or HVPIPE_TIMEOUT"
            )
        text, matters = doctor_ranks.compared(as_json=options.json, colours=False)
        if text:
            print(text)
        return int(matters)
    words = [*(["--json"] if options.json else []), *(["--colours"] if has_colours(environ) else [])]
    command = (sys.executable, "-u", "-m", "hvpipe.commands.doctor_ranks", *words)
    spec = launch_options.launch_spec(options, command, environ)
    settings = {} if environ.get("HVPIPE_TIMEOUT") else {"HVPIPE_TIMEOUT": f"{_TIMEOUT_S}"}
    settings |= launch_options.timeout_setting(options)
    return launch_options.start(spec, settings, environ, dry_run=options.dry_run, supervised=_supervised)


def _supervised(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the ranks and print what rank 0 found; what the launcher prints goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="hvpipe-doctor-") as folder:
        path = Path(folder, "stdout")
        with path.open("wb") as output:
            outcome = supervise_job(command, environ, Path(folder), Grace(), quiet=True, output=output)
        text, matters, others = doctor_ranks.split(path.read_text(errors="replace"))
    print(text, end="", flush=True)
    print(outcome.kept + others, end="", file=sys.stderr, flush=True)
    if outcome.asked:
        return outcome.code
    if matters is not None and outcome.code == 0:
        return int(matters)
    # Open MPI's mpirun may end with 0 although it has lost a host.
    what = "have not compared the hosts" if matters is None else "have compared the hosts, but then failed"
    print(f"hvpipe doctor: The ranks {what}. The launcher's exit code: {outcome.code}", file=sys.stderr)
    return _COULD_NOT_START


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
