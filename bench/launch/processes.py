"""Processes that run together and end together: at their end, at the first failure, or at a deadline."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.launch import mpirun
from bench.launch.termination import undisturbed
from hvpipe.commands.supervise import own_job_folder

_LEAVE_S = 5.0  # the longest wait for killed processes
_POLL_S = 0.05


@dataclass(frozen=True)
class Command:
    """A command line, and what it adds to this process's environment."""

    name: str
    line: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How the processes ended. `why` is "" if the deciding ones ended well; `output` has the end of their
    output.
    """

    why: str
    output: str


def run_together(
    commands: Sequence[Command], directory: Path, *, timeout_s: float, decides: int | None = None
) -> Ended:
    """Run commands at once until all have ended, or the one with index `decides` has; then end the rest.

    Their output goes to files in `directory`. Their command lines should contain its name: whatever still
    runs with that name at the end is ended as well.
    """
    outputs = [directory / f"{command.name}.output" for command in commands]
    deadline_s = time.monotonic() + timeout_s
    running: list[subprocess.Popen[bytes]] = []
    with ExitStack() as files:
        environ = files.enter_context(own_job_folder(os.environ))
        try:
            for command, output in zip(commands, outputs, strict=True):
                running.append(
                    subprocess.Popen(
                        command.line,
                        stdin=subprocess.DEVNULL,
                        stdout=files.enter_context(output.open("wb")),
                        stderr=subprocess.STDOUT,
                        env={**environ, **command.environment},
                        start_new_session=True,
                    )
                )
            deciding = running if decides is None else [running[decides]]
            while True:
                codes = [process.poll() for process in running]
                failed = next((number for number, code in enumerate(codes) if code), None)
                if failed is not None:
                    why = f"{commands[failed].name} ended with status {codes[failed]}"
                    return Ended(why, _end_of(outputs[failed]))
                if all(process.returncode == 0 for process in deciding):
                    return Ended("", "")
                if time.monotonic() > deadline_s:
                    said = "".join(
                        f"--- {c.name}\n{_end_of(o, 2000)}" for c, o in zip(commands, outputs, strict=True)
                    )
                    return Ended(f"did not end within {timeout_s:g} s", said)
                time.sleep(_POLL_S)
        finally:
            with undisturbed():
                for process in running:
                    mpirun.end(process)
                    with suppress(ProcessLookupError):  # processes that outlive the first of their group
                        os.killpg(process.pid, signal.SIGKILL)
                end_left_behind(str(directory))


def _end_of(output: Path, most: int = 6000) -> str:
    return plain(output.read_text(errors="replace"))[-most:]


def plain(output: str) -> str:
    """Return a program's output without terminal colours and cursor moves."""
    uncoloured = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", uncoloured)


def end_left_behind(words: str) -> None:
    """Kill processes with these words in their command line, and wait for their end."""
    killed = []
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and any(words in word for word in process.info["cmdline"] or ()):
            with suppress(psutil.Error):
                process.kill()
                killed.append(process)
    deadline_s = time.monotonic() + _LEAVE_S
    while any(_runs(process) for process in killed) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not, but psutil.wait_procs would wait for it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
