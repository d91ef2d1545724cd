"""What /proc says about this process."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
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


def used(meter: ThreadMeter) -> float | None:
    """Look until there is a figure above 0, or for some readings."""
    found = None
    for _ in range(200):
        time.sleep(0.001)  # so that a thread computes meanwhile
        if found := meter.look():
            break
    return found


def test_only_threads_of_a_name_are_measured() -> None:
    meter, other = ThreadMeter(["a thread"]), ThreadMeter(["another"])
    assert meter.look() is None
    with working(b"a thread"):
        found = used(meter)
        assert found is not None
        assert 0 < found < 1.5
        assert used(other) is None
    assert used(meter) is None  # it has ended
    with working(b"a thread"), working(b"another"):
        assert used(meter)  # one that begins later is found
