"""Signals that end a benchmark leave its blocks as exceptions do, so that everything it started ends too."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_STOPPING = (signal.SIGINT, *_ENDING)


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Inside the block, make SIGTERM and SIGHUP raise SystemExit(128 + n), as Ctrl-C raises
    KeyboardInterrupt.

    An ignored signal (a hangup under nohup) stays ignored. This works only in the main thread; in other
    threads it does nothing.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handled_by(leave, _ENDING):
        yield


@contextmanager
def postponed() -> Iterator[None]:
    """Put off signals that would stop us until the block is done, then raise the first one that came.

    Processes started in the block get them as always. This works only in the main thread: for a signal that
    another thread receives, Python runs the handler in the main one.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    try:
        with _handled_by(note, _STOPPING):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextmanager
def undisturbed() -> Iterator[None]:
    """As `postponed`, but system calls and processes started in the block do not get these signals either."""
    with postponed():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # signals that waited for this are noted, too


@contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals]
) -> Iterator[None]:
    """Inside the block, give these signals that handler, except for ignored ones."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in numbers}
    replaced = {number: former for number, former in before.items() if former is not signal.SIG_IGN}
    try:
        for number in replaced:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in replaced.items():
            signal.signal(number, former)
