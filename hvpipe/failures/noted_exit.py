"""Notes where the program called `sys.exit`: Python tells no handler of an uncaught SystemExit."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from hvpipe.environment.discover import discover
from hvpipe.environment.job_folder import CHOSEN_CODES, tell_exit
from hvpipe.environment.settings import job_folder


@dataclass(frozen=True)
class ExitCall:
    """A call of `sys.exit` that the program has not caught.

    Attributes:
        text: What was called and where: "sys.exit(3) in train.py, line 12".
        code: The exit code.
    """

    text: str
    code: int


_call: ExitCall | None = None


class _NotedExit(SystemExit):
    """The exception of `sys.exit`. It forgets the call if the program catches it."""

    def __del__(self) -> None:
        global _call
        # An uncaught one is freed when no frame is left.
        with contextlib.suppress(ValueError, AttributeError):
            sys._getframe(1)
            _call = None


def note_exits() -> None:
    """From now on, note where the main thread calls `sys.exit`, `exit` or `quit`."""
    for place, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
        leave = getattr(place, name, None)  # Python's option -S leaves out the last two
        if leave is not None and not hasattr(leave, "notes_exits"):
            setattr(place, name, _noting(leave, "sys.exit" if place is sys else name))
    atexit.unregister(_tell)
    atexit.register(_tell)


def exit_call() -> ExitCall | None:
    """Return the call that ends this program; None if it ends in another way, also by `raise SystemExit`."""
    return _call


def _tell() -> None:
    """Tell `hvpipe run` of the call, because the launcher prints only the exit code."""
    folder, rank = job_folder(), discover().rank
    if _call is not None and _call.code not in (0, *CHOSEN_CODES) and folder is not None and rank is not None:
        tell_exit(folder, rank, _call.code, _call.text)


def _noting(leave: Callable[..., Any], name: str) -> Callable[..., NoReturn]:
    process = os.getpid()

    def noted(status: Any = None, /) -> NoReturn:
        global _call
        if os.getpid() != process or threading.current_thread() is not threading.main_thread():
            leave(status)
        frame = sys._getframe(1)
        given = "" if status is None else repr(status)
        where = f"{os.path.basename(frame.f_code.co_filename)}, line {frame.f_lineno}"
        code = status if isinstance(status, int) else int(status is not None)
        _call = ExitCall(f"{name}({given}) in {where}", code & 0xFF)
        raise _NotedExit(*(() if status is None else (status,)))

    noted.notes_exits = True  # type: ignore[attr-defined]
    return noted
