"""Signals that end a benchmark leave its blocks as exceptions do, so that what it started ends too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """In the block SIGTERM and SIGHUP raise SystemExit(128 + n), as Ctrl-C raises KeyboardInterrupt.

    One that is ignored (a hangup under nohup) stays ignored. Only the main thread can ask for this; in
    another one it does nothing.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in _ENDING}
    replaced = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back the signals that would stop us, until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
