"""Threads for calls that may block for ever: as many as calls are under way, and none delays the exit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Started:
    """A call that runs on a thread of the pool."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the call to end; return whether it ended in time."""
        return self._ended.wait(timeout_s)

    def result(self) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result

    def run(self) -> None:
        """Call, on this thread."""
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        self._ended.set()


class DaemonPool:
    """Runs each call at once, on an idle thread or on a new one.

    `concurrent.futures` limits its threads, so calls that wait for each other could wait for ever, and joins
    them at exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: deque[Started] = deque()
        self._changed = threading.Condition()
        self._idle = 0

    def start(self, call: Callable[[], Any]) -> Started:
        """Run a call on a thread; return a handle to it."""
        started = Started(call)
        with self._changed:
            self._waiting.append(started)
            if self._idle >= len(self._waiting):
                self._changed.notify()
                return started
        threading.Thread(target=self._loop, name=self._name, daemon=True).start()
        return started

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._waiting:
                    self._changed.wait()
                self._idle -= 1
                run = self._waiting.popleft().run
            run()
            del run  # an idle thread keeps nothing alive
