"""`hvpipe top`: a live view of all ranks of a running job; plain lines without a terminal."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hvpipe.commands.terminal import has_colours
from hvpipe.environment.settings import live_folder
from hvpipe.errors import HvpipeError
from hvpipe.monitor.status_files import GONE_S, RankStatus, RunningJob, read_jobs, status_root
from hvpipe.own_folder import check_own

_SILENT_S = 5.0  # a rank that has been silent for longer is marked
_LONGEST_S = 86_400.0
_HOME_AND_CLEAR = "\033[H\033[J"

Column = tuple[str, Callable[[RankStatus], str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hvpipe top`."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="the name of a job, or its first characters (default: the newest job)",
    )
    parser.add_argument("--json", action="store_true", help="print the status once, as JSON")
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)"
    )


def run(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Show a job until it ends or Ctrl-C. Returns 0; raises HvpipeError if there is no such job."""
    if not 0 < options.interval <= _LONGEST_S:
        raise HvpipeError(
            f"--interval should be a positive number of seconds, at most {_LONGEST_S:.0f}. "
            f"Received: --interval {options.interval:g}"
        )
    named = live_folder(environ)
    root = status_root(named)
    if named is None:
        try:
            check_own(root)
        except PermissionError as error:
            raise HvpipeError(f"The folder of jobs should be yours. Received: {error.strerror}") from error
    job = choose(read_jobs(root), options.job, root)
    if options.json:
        print(json.dumps(to_json(job), indent=1))
        return 0
    try:
        _watch(root, job.name, options.interval, has_colours(environ))
    except KeyboardInterrupt:
        print()
    except BrokenPipeError:
        # At exit Python would try to flush stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def choose(jobs: Sequence[RunningJob], name: str | None, root: Path) -> RunningJob:
    """Return the newest job whose name starts with `name`, or the newest of all."""
    matching = [job for job in jobs if name is None or job.name.startswith(name)]
    if not matching:
        wanted = "a job (of `hvpipe run`, or with HVPIPE_LIVE=1)" if name is None else f"job {name}"
        seen = ", ".join(job.name for job in jobs) or "none"
        raise HvpipeError(f"{wanted} should be running on this host. Jobs in {root}: {seen}")
    return matching[0]


def to_json(job: RunningJob) -> dict[str, object]:
    """Return the status of a job; `heard_s_ago` is the age of a rank's figures in seconds."""
    now_s = time.time()
    return {
        "job": job.name,
        "began_s": job.began_s,
        "ranks": [{**one.to_json(), "heard_s_ago": round(now_s - one.at_s, 3)} for one in job.ranks],
    }


def to_text(job: RunningJob, now_s: float, colours: bool) -> list[str]:
    """Return a line about the job, a heading, and a line per rank."""
    columns = [(name, show) for name, show in _COLUMNS if any(show(one) != "-" for one in job.ranks)]
    rows = [[show(one) for _, show in columns] for one in job.ranks]
    heading = [name for name, _ in columns]
    widths = [max(len(row[i]) for row in [heading, *rows]) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))

    lines = [_title(job, now_s), line(heading)]
    for one, row in zip(job.ranks, rows, strict=True):
        silent_s = now_s - one.at_s
        if silent_s < _SILENT_S:
            lines.append(line(row))
        else:
            late = f"{line(row)}  silent for {silent_s:.0f} s"
            lines.append(f"\033[31m{late}\033[0m" if colours else late)
    if colours:
        lines[0], lines[1] = f"\033[1m{lines[0]}\033[0m", f"\033[2m{lines[1]}\033[0m"
    return lines


def _title(job: RunningJob, now_s: float) -> str:
    size = job.ranks[0].size
    heard = f"{size} ranks" if len(job.ranks) == size else f"{len(job.ranks)} of {size} ranks heard"
    minutes, seconds = divmod(int(now_s - job.began_s), 60)
    age = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    rates = [one.images_per_s for one in job.ranks if one.images_per_s is not None]
    total = f", {sum(rates):,.1f} images/s" if rates else ""
    return f"{job.ranks[0].script}: {heard}, {age}{total}, job {job.name}"


def _watch(root: Path, name: str, interval_s: float, colours: bool) -> None:
    """Refresh the view of the job, in place on a terminal, until it has ended."""
    on_terminal = sys.stdout.isatty()
    while True:
        job = next((job for job in read_jobs(root) if job.name == name), None)
        if job is None:
            print(f"Job {name} has ended, or has been silent for {GONE_S:.0f} s.")
            return
        lines = to_text(job, time.time(), colours)
        if on_terminal:
            size = shutil.get_terminal_size()
            shown = [_cut(line, size.columns) for line in lines[: size.lines - 2]]
            left_out = len(lines) - len(shown)
            below = f"... and {left_out} more ranks" if left_out else "Ctrl-C to quit"
            sys.stdout.write(_HOME_AND_CLEAR + "\n".join([*shown, below]))
        else:
            print("\n".join(lines))
        sys.stdout.flush()
        time.sleep(interval_s)


def _cut(line: str, columns: int) -> str:
    """Cut a line to the width of the terminal; a coloured line keeps its colour codes."""
    start, end = ("", "")
    if line.startswith("\033["):
        start, line = line[: line.index("m") + 1], line[line.index("m") + 1 : -len("\033[0m")]
        end = "\033[0m"
    return start + line[: columns - 1] + end


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.2f} GB"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{_bytes(value)}/s"


_COLUMNS: tuple[Column, ...] = (
    ("rank", lambda one: str(one.rank)),
    ("host", lambda one: one.host),
    ("step", lambda one: str(one.steps)),
    ("step time", lambda one: _number(one.step_s and one.step_s * 1e3, ",.1f", " ms")),
    ("images/s", lambda one: _number(one.images_per_s, ",.1f")),
    ("cores", lambda one: _number(one.process_cores, ".2f")),
    ("host CPU", lambda one: _share(one.system_share)),
    ("memory", lambda one: _bytes(one.resident_bytes)),
    ("GPU", lambda one: _share(one.gpu_share)),
    ("GPU mem", lambda one: _bytes(one.gpu_memory_bytes)),
    ("power", lambda one: _number(one.gpu_power_w, ".0f", " W")),
    ("sent", lambda one: _rate(one.sent_bytes_per_s)),
)
