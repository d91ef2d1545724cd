"""Run the launcher of the ranks: hand signals on to it, see that all of it ends, return its exit code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hvpipe.errors import LaunchError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Batch systems send these as a warning; they are for the ranks, to which mpirun hands them on.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

_JOB_FOLDER = "PRTE_MCA_prte_local_tmpdir_base"

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@contextlib.contextmanager
def own_job_folder(environ: Mapping[str, str], command: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """`environ` with a new folder for the files of Open MPI 5's mpirun, which goes with the block.

    They usually lie in /tmp/ompi.PID. Where an mpirun was killed they stay, and a later one that happens to
    get its number ends with "The PMIx server's listener thread failed to start". Where `environ` or
    `command` name a folder, it is left to them.
    """
    if any(word.endswith("tmpdir_base") for word in (*environ, *command)):
        yield dict(environ)
        return
    folder = tempfile.mkdtemp(prefix="hvpipe-job-")
    try:
        yield {**environ, _JOB_FOLDER: folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def supervise(command: Sequence[str], environ: Mapping[str, str], grace_s: float = 5.0) -> int:
    """Run a command until it ends; called from the main thread.

    The first SIGINT, SIGTERM, SIGHUP or SIGQUIT goes on to the command, which then has `grace_s` to end its
    ranks; what is left after that, or at a second signal, is killed, as is what a command that failed
    leaves. SIGUSR1 and SIGUSR2 go on to it and end nothing here. Returns the command's exit code, or
    128 + n where signal n ended it or was sent to this process. Where this process is killed, the command
    gets a SIGTERM.
    """
    supervisor = _Supervisor(grace_s)
    before = {number: signal.getsignal(number) for number in (*_ENDING, *_PASSED_ON)}
    # Signals ignored so far (nohup, a background job of a script) stay ignored.
    replaced = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in replaced:
        signal.signal(number, supervisor.on_signal if number in _ENDING else supervisor.pass_on)
    try:
        with own_job_folder(environ, command) as its_environ:
            return supervisor.run(command, its_environ)
    finally:
        for number in replaced:
            signal.signal(number, before[number])


class _Supervisor:
    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._received: int | None = None
        self._timer: threading.Timer | None = None

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        sys.stdout.flush()
        try:
            # In a session of its own the command gets a Ctrl-C once, from here, and not from the terminal
            # as well: mpirun takes a second one as an order to leave at once, whatever its ranks do.
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_ends_with_this_process(),
            )
        except OSError as error:
            raise LaunchError(f"The launcher should be a program that runs. Received: {error}") from error
        if self._received is not None:  # it came while the process was being started
            self._forward(self._received)
        code = self._process.wait()
        if self._timer is not None:
            self._timer.cancel()
        if self._received is not None or code != 0:
            kill_session(self._process.pid)
        if self._received is not None:
            return 128 + self._received
        return code if code >= 0 else 128 - code

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        first = self._received is None
        if first:
            self._received = number
        if self._process is None:
            return
        if first:
            self._forward(number)
        else:
            kill_session(self._process.pid)

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _forward(self, number: int) -> None:
        assert self._process is not None
        self._timer = threading.Timer(self._grace_s, kill_session, [self._process.pid])
        self._timer.daemon = True
        self._timer.start()
        self._process.send_signal(number)


def _ends_with_this_process() -> Callable[[], None] | None:
    """What a child does before its program begins, so that it gets SIGTERM should this process be killed.

    Nothing can hand SIGKILL on. All is looked up here: between fork and exec nobody may wait for a lock.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not on Linux
        return None
    parent = os.getpid()

    def prepare() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # which was killed before that
            os._exit(128 + signal.SIGTERM)

    return prepare


def kill_session(session: int) -> None:
    """Kill every process of a session; mpirun puts ranks into process groups of their own, not sessions."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
