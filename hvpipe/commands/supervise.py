"""Runs the launcher of the ranks, forwards signals to it, and makes sure that all its processes end."""

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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from hvpipe.commands.launcher_noise import FilteredErrors
from hvpipe.environment.job_folder import STOPPED, any_aborts, any_listens, ask_to_stop
from hvpipe.errors import LaunchError

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Batch systems send these as a warning to the ranks; mpirun forwards them.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

_JOB_FOLDER = "PRTE_MCA_prte_local_tmpdir_base"

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@contextlib.contextmanager
def own_job_folder(environ: Mapping[str, str], command: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """Yield `environ` with a separate folder for the files of Open MPI 5's mpirun; remove it afterwards.

    By default the files are in /tmp/ompi.PID. If an mpirun was killed, they stay, and a later mpirun with the
    same PID ends with "The PMIx server's listener thread failed to start". If `environ` or `command` already
    name a folder, that one is used.
    """
    if any(word.endswith("tmpdir_base") for word in (*environ, *command)):
        yield dict(environ)
        return
    folder = tempfile.mkdtemp(prefix="hvpipe-job-")
    try:
        yield {**environ, _JOB_FOLDER: folder}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


CHECKPOINT_GRACE_S = 30.0
"""For ranks that write a checkpoint after SIGTERM: schedulers kill after some 30 s."""

_STUCK_S = 5.0

# Slurm sends SIGTERM to all processes of a job: to `hvpipe run`, and to the script, which passes it on.
_SAME_SIGTERM_S = 2.0

JOB_FOLDER = "HVPIPE_JOB_FOLDER"
"""The variable that names the job folder to the ranks."""


@dataclass(frozen=True)
class Grace:
    """How long to wait, in seconds.

    Attributes:
        end_s: Between the first signal and the kill.
        checkpoint_s: Before SIGTERM is forwarded, if a rank here writes a checkpoint when asked.
    """

    end_s: float = 5.0
    checkpoint_s: float = CHECKPOINT_GRACE_S


@dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
        code: Its exit code; 128 + n for signal n.
        asked: Whether this process got a signal.
        kept: What was not printed of its output; see `launcher_noise`.
    """

    code: int
    asked: bool
    kept: str = ""


def supervise(command: Sequence[str], environ: Mapping[str, str], grace_s: float = 5.0) -> int:
    """Run a command as `supervise_job` does, in a job folder of its own; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="hvpipe-profile-") as folder:
        return supervise_job(command, environ, Path(folder), Grace(grace_s)).code


def supervise_job(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path,
    grace: Grace = Grace(),
    *,
    quiet: bool = False,
    output: BinaryIO | None = None,
    ask_elsewhere: Callable[[], bool] | None = None,
) -> Outcome:
    """Run a command until it ends. Call it from the main thread.

    The first SIGINT, SIGTERM, SIGHUP or SIGQUIT is forwarded to the command, which then has `grace.end_s`
    seconds to end its ranks. After that, at a second signal, or if the command fails, its remaining processes
    are killed. A second SIGTERM within two seconds counts as the first one. SIGUSR1 and SIGUSR2 are only
    forwarded. If this process is killed, the command gets SIGTERM.

    SIGTERM comes later if a rank of this host has said in the job folder that it writes a checkpoint when
    asked. It is asked by a file there, and has `grace.checkpoint_s` seconds. So have ranks of other hosts, if
    `ask_elsewhere` finds one that writes it.

    Args:
        command: The program and its arguments.
        environ: The environment of the program.
        folder: The job folder, shared with the ranks of this host. They say there that they listen, fail, or
            have completed a checkpoint.
        grace: How long to wait.
        quiet: Whether to keep back what the launcher prints around a rank's failure.
        output: The file that the command's stdout goes to; None: this process's stdout.
        ask_elsewhere: Asks ranks of other hosts for a checkpoint, and tells whether one of them writes it.

    Returns:
        The command's exit code; 128 + n if signal n ended it or was sent to this process, except that 75
        stays 75: the ranks have written a checkpoint first.
    """
    supervisor = _Supervisor(grace, folder, quiet, output, ask_elsewhere)
    before = {number: signal.getsignal(number) for number in (*_ENDING, *_PASSED_ON)}
    # Signals that were ignored (nohup, a background job of a script) stay ignored.
    replaced = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in replaced:
        signal.signal(number, supervisor.on_signal if number in _ENDING else supervisor.pass_on)
    try:
        with own_job_folder(environ, command) as job_environ:
            outcome = supervisor.run(command, {**job_environ, JOB_FOLDER: str(folder)})
    finally:
        for number in replaced:
            signal.signal(number, before[number])
    # Only now, because a signal that comes while the folder is removed must not be lost.
    return replace(outcome, asked=supervisor.asked)


class _Supervisor:
    """One running command, and its signal handlers."""

    def __init__(
        self,
        grace: Grace,
        folder: Path,
        quiet: bool,
        output: BinaryIO | None,
        ask_elsewhere: Callable[[], bool] | None,
    ) -> None:
        self._ask_elsewhere = ask_elsewhere
        self._grace = grace
        self._quiet = quiet
        self._output = output
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._received: int | None = None
        self._received_at = 0.0
        self._timer: threading.Timer | None = None

    @property
    def asked(self) -> bool:
        """Whether this process got a signal that ends it."""
        return self._received is not None

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> Outcome:
        """Run the command until it ends."""
        sys.stdout.flush()
        try:
            # In a separate session the command gets Ctrl-C only once: from here, not also from the terminal.
            # At a second Ctrl-C, mpirun would leave at once, whatever its ranks do.
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                start_new_session=True,
                preexec_fn=_end_with_this_process(),
                stdout=self._output,
                stderr=subprocess.PIPE if self._quiet else None,
            )
        except OSError as error:
            raise LaunchError(f"The launcher does not start: {error}") from error
        if self._received is not None:  # the signal came while the process started
            self._end(self._received)
        errors = FilteredErrors(self._process) if self._quiet else None
        done = threading.Event()
        watcher = threading.Thread(target=self._end_stuck_launcher, args=(self._process, done), daemon=True)
        watcher.start()
        code = self._process.wait()
        done.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._received is not None or code != 0:
            kill_session(self._process.pid)
        kept = "" if errors is None else errors.end()
        if self._received is not None and code != STOPPED:
            return Outcome(128 + self._received, self.asked, kept)
        return Outcome(code if code >= 0 else 128 - code, self.asked, kept)

    def _end_stuck_launcher(self, process: subprocess.Popen[bytes], done: threading.Event) -> None:
        """Kill a launcher that a rank has asked to end the job, and that does not.

        Open MPI waits for the daemons of all hosts. If the link to one of them is down, it waits without end.
        """
        while not done.wait(1.0):
            if any_aborts(self._folder):
                break
        if done.wait(_STUCK_S):
            return
        print(
            f"hvpipe run: a rank failed, but the launcher did not end the job within {_STUCK_S:g} s, so it "
            "is killed. Its processes on hosts that cannot be reached end at their own deadlines.",
            file=sys.stderr,
            flush=True,
        )
        kill_session(process.pid)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward the first ending signal; kill the command at the second."""
        first = self._received is None
        if first:
            self._received, self._received_at = number, time.monotonic()
        elif number == self._received == signal.SIGTERM and self._received_s_ago() < _SAME_SIGTERM_S:
            return
        if self._process is None or self._process.returncode is not None:
            return
        if first:
            self._end(number)
        else:
            kill_session(self._process.pid)

    def _received_s_ago(self) -> float:
        return time.monotonic() - self._received_at

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal that ends nothing."""
        if self._process is not None:
            self._process.send_signal(number)

    def _end(self, number: int) -> None:
        """Ask the ranks for a checkpoint if one listens and the signal is SIGTERM; otherwise forward it."""
        # If somebody has removed the folder, ranks may listen.
        if number == signal.SIGTERM and (any_listens(self._folder) or not self._folder.exists()):
            try:
                ask_to_stop(self._folder)
            except OSError as error:  # a full disk: the ranks that listen do so for SIGTERM, too
                why = error.strerror or error
                print(f"hvpipe run: the ranks cannot be asked for a checkpoint: {why}", file=sys.stderr)
            else:
                self._after(self._grace.checkpoint_s, self._forward, number)
                return
        elif number == signal.SIGTERM and self._ask_elsewhere is not None:
            self._after(self._grace.checkpoint_s, self._forward, number)
            # It takes seconds, in which a second signal may come.
            threading.Thread(target=self._forward_unless_asked, args=(number,), daemon=True).start()
            return
        self._forward(number)

    def _forward_unless_asked(self, number: int) -> None:
        """Forward the signal at once if no rank of another host writes a checkpoint."""
        assert self._ask_elsewhere is not None
        if not self._ask_elsewhere() and self._timer is not None:
            self._timer.cancel()
            self._forward(number)

    def _forward(self, number: int) -> None:
        assert self._process is not None
        self._after(self._grace.end_s, kill_session, self._process.pid)
        self._process.send_signal(number)

    def _after(self, delay_s: float, call: Callable[[int], None], argument: int) -> None:
        self._timer = threading.Timer(delay_s, call, [argument])
        self._timer.daemon = True
        self._timer.start()


def _end_with_this_process() -> Callable[[], None] | None:
    """Return the function that a child runs before its program, so that it gets SIGTERM if this process dies.

    Nobody can forward SIGKILL. All look-ups happen here: between fork and exec nothing may wait for a lock.
    """
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # not on Linux
        return None
    parent = os.getpid()

    def prepare() -> None:
        prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # this process was killed before prctl
            os._exit(128 + signal.SIGTERM)

    return prepare


def kill_session(session: int) -> None:
    """Kill every process of a session. mpirun gives ranks separate process groups, but not sessions."""
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
