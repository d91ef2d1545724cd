"""An uncaught exception on one rank ends all ranks, so that none waits for a rank that failed."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType

from hvpipe.environment.job_folder import launcher_prints, tell_error
from hvpipe.environment.settings import job_folder
from hvpipe.failures.flight_record import tell_recorder
from hvpipe.failures.noted_exit import note_exits
from hvpipe.world.open import running_ranks
from hvpipe.world.world import RunningRanks, World

# How lines begin that say where an error happened.
_PLACES = ("Detected at node", "<stack traces", "Stack trace", "Traceback")

# Errors of a rank that another one has left. That rank knows the cause, and the exit code of the job.
_FOLLOWS = ("PeerError", "UnavailableError")
_CAUSE_FIRST_S = 2.0
_LEAVES_WITHIN_S = 10.0  # the end of a Python with TensorFlow
_UNAVAILABLE = "originally returned UnavailableError"  # which TensorFlow's graphs turn into InternalError
_HAS_LEFT = "all ranks should call it before they shut down or end"  # csrc/named/coordinator.cc


def abort_on_uncaught_errors(show_error: Callable[[], object] = lambda: None) -> None:
    """Install the hook that ends all ranks after an uncaught exception. Another call does nothing.

    `show_error` shows a rank that waits for the others at its end that this one has failed, so that it ends
    the job with its own exit code. It may raise or wait.
    """
    if not isinstance(sys.excepthook, _AbortAllRanks):
        sys.excepthook = _AbortAllRanks(show_error)
    note_exits()


def in_one_line(error: BaseException) -> str:
    """Return the kind of an error and the line of its text that says what is wrong.

    TensorFlow and Keras begin with where an error happened ("Graph execution error:"), and say what in a
    later paragraph.
    """
    plain = re.sub(r"\x1b\[[\d;]*m|\{\{[^}]*\}\}\s*", "", str(error))
    first, *rest = [line for line in plain.splitlines() if line.strip()] or [""]
    rest = [line for line in rest if not line[0].isspace() and not line.startswith(_PLACES)]
    if first.endswith(":") or first.startswith("Exception encountered when calling"):
        first = " ".join([first, *rest[:1]])
    kind = "UnavailableError" if _UNAVAILABLE in plain else type(error).__name__
    return f"{kind}: {first}".removesuffix(": ").removesuffix(".")


def tell_end_of_rank(world: World | RunningRanks, why: str, text: str) -> None:
    """Record why this rank ends, and print the text, or let `hvpipe run` do it after the job's other output.

    Args:
        world: The ranks.
        why: The cause in one line. It begins with the kind of the error.
        text: The traceback, or what else tells more.
    """
    tell_recorder(why)
    folder = job_folder()
    if folder is not None:
        kind, _, rest = why.partition(":")
        told = tell_error(folder, world.rank, f"{kind} on rank {world.rank}:{rest}", text)
        if told and launcher_prints(folder):
            return
    # One write, so that ranks that fail together do not mix their lines.
    message = f"\nhvpipe: rank {world.rank} of {world.size} on {world.host} failed:\n{text}"
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(message)
        sys.stderr.flush()


class _AbortAllRanks:
    """An exception hook that prints the traceback and ends all ranks, as `python -m mpi4py` does.

    It also serves a rank that failed to join. Otherwise MPI would wait for the other ranks when this process
    exits, and they would wait for this rank. A child of `os.fork()` is no rank and ends nobody.
    """

    def __init__(self, show_error: Callable[[], object]) -> None:
        self._show_error = show_error
        self._previous = sys.excepthook
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = running_ranks() if os.getpid() == self._process else None
        if world is None or world.alone:
            self._previous(kind, error, trace)
        elif issubclass(kind, KeyboardInterrupt):
            tell_recorder("KeyboardInterrupt")
            self._previous(kind, error, trace)
            world.abort(130)
        else:
            why = in_one_line(error)
            tell_end_of_rank(world, why, "".join(traceback.format_exception(kind, error, trace)))
            if why.partition(":")[0] in _FOLLOWS:
                left = _HAS_LEFT in why  # and waits in its shutdown
                if left:
                    threading.Thread(target=self._show, name="hvpipe-show-error", daemon=True).start()
                # The launcher ends this rank sooner.
                time.sleep(_LEAVES_WITHIN_S if left else _CAUSE_FIRST_S)
            world.abort(1)

    def _show(self) -> None:
        with contextlib.suppress(Exception):
            self._show_error()
