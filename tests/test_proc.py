"""What /proc says about this process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hvpipe.proc import ThreadMeter

_SET_NAME = 15  # PR_SET_NAME of linux/prctl.h


@contextmanager
def working(name: bytes) -> Iterator[None]:
    """Have a thread of this name that works now and then."""
    began, stop = threading.Event(), threading.Event()

    def work() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, name, 0, 0, 0)
        began.set()
        while not stop.wait(1e-4):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(60)
    try:
        yield
    finally:
        stop.set()
        thread.join()


def until(meter: ThreadMeter, wanted: Callable[[float | None], bool]) -> None:
    """Look until a figure is as wanted."""
    deadline_s = time.monotonic() + 60
    while not wanted(found := meter.look()):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.001)  # so that a thread works meanwhile


def test_only_threads_of_a_name_are_measured() -> None:
    meter, other = ThreadMeter("a thread"), ThreadMeter("another")
    assert meter.look() is None
    with working(b"a thread"):
        until(meter, bool)
        assert other.look() is None
        with working(b"another"):
            until(other, bool)
        until(other, lambda found: found is None)  # it has ended
        until(meter, bool)
    with working(b"another"):
        until(other, bool)  # one that begins later is found
