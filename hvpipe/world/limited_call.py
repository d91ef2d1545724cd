"""Limits the time of MPI calls that wait for other ranks and that nothing can interrupt."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from hvpipe.environment.job_folder import abort_marker
from hvpipe.environment.native import built_for_mpi, import_native, mpi_fits
from hvpipe.environment.settings import job_folder
from hvpipe.errors import InitError


@contextlib.contextmanager
def limited_call(who: str, library: str, what: str, limit_s: float, setting: str) -> Iterator[None]:
    """End this process if the calls inside take longer, and let `hvpipe run` end the other ranks.

    No exception could end it, because the calls hold the thread. So they come after all that can fail with a
    better message. Where hvpipe was built for another MPI there is no limit, and `check_mpi` says more soon.

    Args:
        who: Names this rank.
        library: Name and version of MPI.
        what: Names the calls.
        limit_s: The longest time, in seconds.
        setting: The variable that changes the limit.
    """
    timer, folder = None, job_folder()
    with contextlib.suppress(InitError):
        if mpi_fits(built_for_mpi(), library):
            with contextlib.suppress(AttributeError, OSError, ValueError):  # no stdout, or a closed one
                sys.stdout.flush()
            timer = import_native().ExitTimer(
                limit_s,
                f"\nhvpipe: {who} waited {limit_s:g} s in {what}: every rank should take part within that "
                f"time ({setting}). Received: nothing from at least one rank. Has it ended, or does it hang? "
                "This rank exits with code 1.\n",
                "" if folder is None else str(abort_marker(folder)),
            )
    try:
        yield
    finally:
        del timer
