"""The threads for calls that may block for ever."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from hvpipe.comm.daemon_pool import DaemonPool


def test_calls_that_wait_for_each_other_all_run() -> None:
    pool, together = DaemonPool("test"), threading.Barrier(20)
    calls = [pool.start(together.wait) for _ in range(20)]
    assert all(call.wait(10.0) for call in calls)
    assert sorted(call.result() for call in calls) == list(range(20))


def test_an_idle_thread_is_used_again() -> None:
    pool = DaemonPool("test")
    names = set()
    for _ in range(10):
        call = pool.start(lambda: threading.current_thread().ident)
        assert call.wait(10.0)
        names.add(call.result())
    assert len(names) <= 2  # a thread may not be idle again at once


def test_an_error_comes_with_the_result() -> None:
    def fail() -> None:
        raise ValueError("on purpose")

    call = DaemonPool("test").start(fail)
    assert call.wait(10.0)
    with pytest.raises(ValueError, match="on purpose"):
        call.result()


def test_a_blocked_call_does_not_delay_the_exit() -> None:
    code = (
        "import threading; from hvpipe.comm.daemon_pool import DaemonPool; "
        "blocked = DaemonPool('test').start(threading.Event().wait); print(blocked.wait(0.1))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert found.stdout == "False\n"
