"""Processes that end with their block, whatever ends it, and several that run and end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.launch.termination import ended_by_exception, postponed, undisturbed
from hvpipe.commands.supervise import own_job_folder

_LEAVE_S = 5.0  # the longest wait for processes that were asked to end, or killed
_POLL_S = 0.05


@contextmanager
def started(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    patience_s: float = _LEAVE_S,
    **options: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a command in its own process group, which ends with the block, also by SIGTERM and SIGHUP.

    `env` is added to this process's environment. `options` are those of subprocess.Popen.
    """
    with ended_by_exception(), own_job_folder({**os.environ, **(env or {})}) as full:
        process = None
        try:
            with postponed():  # a signal during Popen would leave us without the process that it has started
                process = subprocess.Popen(command, env=full, start_new_session=True, **options)
            yield process
        finally:
            if process is not None:
                with undisturbed():
                    end(process, patience_s)


def end(process: subprocess.Popen[Any], patience_s: float = _LEAVE_S) -> tuple[Any, Any]:
    """Ask a process group to end, then kill it with what left the group. Return what was in its pipes."""
    others: list[psutil.Process] = []
    if process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            others = psutil.Process(process.pid).children(recursive=True)
    left: tuple[Any, Any] = ("", "")
    _signal_group(process, signal.SIGTERM)
    try:
        left = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        _kill(process, others)  # they may hold the pipes
        with suppress(subprocess.TimeoutExpired):
            left = process.communicate(timeout=patience_s)
    _kill(process, others)  # processes that outlive the first of their group
    return left


def _kill(process: subprocess.Popen[Any], others: Iterable[psutil.Process]) -> None:
    _signal_group(process, signal.SIGKILL)
    for other in others:
        with suppress(psutil.NoSuchProcess):
            other.kill()


def _signal_group(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run(
    command: Sequence[str],
    *,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    capture: bool = True,
    cwd: Path | None = None,
    patience_s: float = _LEAVE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `started` does.

    After `timeout_s` it is ended, and subprocess.TimeoutExpired has what it had printed.
    """
    pipe = subprocess.PIPE if capture else None
    with started(command, env, patience_s, stdout=pipe, stderr=pipe, text=True, cwd=cwd) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            with undisturbed():
                out, err = end(process, patience_s)
            raise subprocess.TimeoutExpired(list(command), error.timeout, out, err) from None
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


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
    with ExitStack() as stack:
        stack.enter_context(_nothing_left_behind(str(directory)))
        running = []
        for command, output in zip(commands, outputs, strict=True):
            pipes = {"stdout": stack.enter_context(output.open("wb")), "stderr": subprocess.STDOUT}
            made = started(command.line, command.environment, stdin=subprocess.DEVNULL, **pipes)
            running.append(stack.enter_context(made))
        deciding = running if decides is None else [running[decides]]
        while True:
            codes = [process.poll() for process in running]
            failed = next((number for number, code in enumerate(codes) if code), None)
            if failed is not None:
                return Ended(
                    f"{commands[failed].name} ended with status {codes[failed]}", _end_of(outputs[failed])
                )
            if all(process.returncode == 0 for process in deciding):
                return Ended("", "")
            if time.monotonic() > deadline_s:
                said = "".join(
                    f"--- {c.name}\n{_end_of(o, 2000)}" for c, o in zip(commands, outputs, strict=True)
                )
                return Ended(f"did not end within {timeout_s:g} s", said)
            time.sleep(_POLL_S)


def _end_of(output: Path, most: int = 6000) -> str:
    """Return the end of a program's output, without terminal colours and cursor moves."""
    uncoloured = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.read_text(errors="replace"))
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", uncoloured)[-most:]


@contextmanager
def _nothing_left_behind(words: str) -> Iterator[None]:
    try:
        yield
    finally:
        with undisturbed():
            end_left_behind(words)


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
