"""Keeps back what Open MPI and MPICH print around a failure, because `hvpipe run` says what happened."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import threading

_RULE = b"-" * 74
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_MOST_LINES = 12  # of a block that is known
_READ_BYTES = 1 << 16
_PAUSE_S = 0.3
_BY = r"(?:prterun|mpirun|mpiexec)"
# Each as one line. A block that differs in a word is printed.
_KNOWN = re.compile(
    r"MPI_ABORT was invoked on rank \d+ in communicator \S+(?: Proc: \[\S+\])?"
    r"(?: Errorcode:| with errorcode) -?\d+\.? "
    r"NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes\. You may or may not see output "
    r"from other processes, depending on exactly when Open MPI kills them\."
    rf'|{_BY} has exited due to process rank \d+ with PID \d+ on node \S+ calling "abort"\. This may have '
    rf"caused other processes in the application to be terminated by signals sent by {_BY} "
    r"\(as reported here\)\."
    rf"|{_BY} noticed that process rank \d+ with PID \d+ on node \S+ exited on signal \d+ \([\w ]+\)\."
    rf"|{_BY} detected that one or more processes exited with non-zero status, thus causing the job to be "
    r"terminated\. The first process to do so was: Process name: \[\S+\] Exit code: \d+"
    r"|Primary job terminated normally, but \d+ process returned a non-zero exit code\. Per user-direction, "
    r"the job has been aborted\."
)
# MPICH's. Its launcher prints a block, too, but on stdout.
_ABORT = b"Abort("
_MPICHS_ABORT = re.compile(
    rb"Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort\(MPI_COMM_WORLD, "
    rb"-?\d+\) - process \d+\n"
)


class NoiseFilter:
    """Passes on bytes, and keeps blocks between two rules, and lines, that are known."""

    def __init__(self) -> None:
        self.kept = b""
        """The blocks that were not passed on."""
        self._block: list[bytes] = []  # lines of a block that may be known
        self._line = b""  # the begin of a line that may be a rule
        self._after_block = False  # Open MPI prints a NUL there

    def feed(self, data: bytes) -> bytes:
        """Return what to print now."""
        passed = b""
        for line in _LINE.findall(self._line + data):
            self._line = b""
            if self._after_block:
                line = line.lstrip(b"\0")
                self._after_block = not line
            if not line.endswith(b"\n"):
                if self._may_be_known(line):
                    self._line = line
                else:
                    passed += line
            elif self._block:
                passed += self._within(line)
            elif line.lstrip(b"\0").rstrip() == _RULE:
                self._block = [line]
            elif _MPICHS_ABORT.fullmatch(line):
                self.kept += line
            else:
                passed += line
        return passed

    def _may_be_known(self, begin: bytes) -> bool:
        """Tell whether a line that begins so may be known, or is in a block."""
        if self._block or begin.startswith(_ABORT):
            return True
        return _ABORT.startswith(begin) or _RULE.startswith(begin.lstrip(b"\0"))

    def release(self) -> bytes:
        """Return what was held back until it is known, because nothing follows."""
        held, self._block, self._line = b"".join(self._block) + self._line, [], b""
        return held

    def _within(self, line: bytes) -> bytes:
        self._block.append(line)
        if line.rstrip() != _RULE:
            return self.release() if len(self._block) > _MOST_LINES else b""
        text = b" ".join(b"".join(self._block[1:-1]).split()).decode(errors="replace")
        if not _KNOWN.fullmatch(text):
            return self.release()
        self.kept += self.release()
        self._after_block = True
        return b""


class FilteredErrors:
    """Copies a process's stderr to this one's, without the noise, on a thread."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stderr is not None
        self._source = process.stderr
        self._filter = NoiseFilter()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="hvpipe-stderr", daemon=True)
        self._thread.start()

    def end(self) -> str:
        """Copy what is left of a process that has ended; return what was kept back."""
        self._ended.set()
        self._thread.join()
        self._source.close()
        return self._filter.kept.decode(errors="replace")

    def _copy(self) -> None:
        source = self._source.fileno()
        while True:
            ready, _, _ = select.select([source], [], [], _PAUSE_S)
            if not ready:
                _write(self._filter.release())
                if self._ended.is_set():  # another process may hold the pipe
                    return
                continue
            data = os.read(source, _READ_BYTES)
            if not data:
                return _write(self._filter.release())
            _write(self._filter.feed(data))


def _write(data: bytes) -> None:
    """Write everything, unless nobody reads any more: the launcher must not wait."""
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(2, data) :]
            except BlockingIOError:  # somebody else has set this on a shared terminal
                select.select([], [2], [])
