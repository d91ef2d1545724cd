"""Preemption: a signal or a file asks this rank to stop, and all ranks stop at the same step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvpipe.environment.job_folder import (
    asked_to_stop,
    away_folder,
    listening,
    listening_away,
    tell_checkpoint,
)
from hvpipe.failures.flight_record import mark_signals


class StopRequest:
    """Notices SIGTERM, and the file through which `hvpipe run` passes its own on.

    Args:
        job_folder: The folder that `hvpipe run` shares with the ranks of its host; None without it.
        rank: This rank.
        job: The path of that folder, also if it is on another host.
    """

    def __init__(self, job_folder: Path | None, rank: int, job: str | None = None) -> None:
        self._folder = away_folder(job) if job_folder is None and job is not None else job_folder
        self._away = job if job_folder is None else None
        self._rank = rank
        self._received = self._signalled = False
        self.too_late = False
        """Whether nobody looks at `arrived` any more: a signal since then acts as one after `fit`."""

    def arrived(self) -> bool:
        """Return whether this rank has been asked to stop."""
        if not self._received and self._folder is not None:
            self._received = asked_to_stop(self._folder)
        return self._received

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM over, and let `hvpipe run` know that this rank stops when asked.

        Only the main thread can take a signal over. The next SIGTERM acts as before.
        """
        with contextlib.ExitStack() as stack:
            if threading.current_thread() is threading.main_thread():
                self._before: Any = signal.signal(signal.SIGTERM, self._on_signal) or signal.SIG_DFL
                mark_signals()  # Python knows no handler in C, and has removed the recorder's
                stack.callback(self._send_again)
                stack.callback(self._act_as_before)
            if self._away is not None:
                stack.enter_context(listening_away(self._away, self._rank))
            elif self._folder is not None:
                stack.enter_context(listening(self._folder, self._rank))
            yield

    def _on_signal(self, number: int, frame: Any) -> None:
        self._received = self._signalled = True
        self._act_as_before()

    def _send_again(self) -> None:
        if self._signalled and self.too_late:
            signal.raise_signal(signal.SIGTERM)

    def _act_as_before(self) -> None:
        signal.signal(signal.SIGTERM, self._before)
        mark_signals()


def tell_launcher(job_folder: Path | None) -> Callable[[Path], None]:
    """Return a function that tells `hvpipe run` of a complete checkpoint, for `--restarts`."""

    def tell(place: Path) -> None:
        if job_folder is not None:
            tell_checkpoint(job_folder, place)

    return tell
