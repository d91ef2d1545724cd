"""Keeps all that an evaluation has so far in results.json, so that nothing is lost or done twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from bench.errors import BenchError
from bench.evaluation.outcome import FILE, EvaluationOutcome, Setting
from bench.evaluation.software import differences
from bench.hosts.links import LinkFacts
from bench.rounds.record import Round
from hvpipe.atomic_file import atomic_file
from hvpipe.config_file import fingerprint


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and lock it until the block or the process ends. BenchError if another process has
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system may have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BenchError(
                    f"One evaluation at a time may run in a folder. Received: {folder}, in use by another"
                ) from error
        yield
    finally:
        os.close(handle)


class Journal:
    """Keeps an evaluation in a folder. Whenever this process ends, the file is complete."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        """Begin, or continue a journal of the same plan. BenchError if the plan is another."""
        self._path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        kept = EvaluationOutcome.read(folder) if self._path.exists() else None
        if kept is not None:
            _require_same(folder, kept.setting, setting)
        self._write(kept or EvaluationOutcome(setting))

    def add_round(self, finished: Round) -> None:
        self._write(replace(self.outcome, rounds=(*self.outcome.rounds, finished)))

    def add_links(self, found: list[LinkFacts]) -> None:
        self._write(replace(self.outcome, links=(*self.outcome.links, *found)))

    def forget_not_up(self) -> None:
        """Remove cases that did not run because their hosts were not up, so that they run again."""
        rounds = tuple(each for each in self.outcome.rounds if not each.not_up)
        self._write(replace(self.outcome, rounds=rounds))

    def forget_failed(self) -> None:
        """Remove what failed, including links that could not be measured, so that it runs again."""
        rounds = tuple(each for each in self.outcome.rounds if not each.error)
        links = tuple(each for each in self.outcome.links if not each.why)
        self._write(replace(self.outcome, rounds=rounds, links=links))

    def _write(self, outcome: EvaluationOutcome) -> None:
        with atomic_file(self._path, sync=True) as file:
            file.write(outcome.to_json().encode())
        self.outcome = outcome


def _require_same(folder: Path, there: Setting, wanted: Setting) -> None:
    """Raise BenchError, which names what differs, if figures of both should not be mixed."""
    before, now = (
        {
            "plan": f"{fingerprint(of.plan)} of suite {of.suite!r}",
            "on": "; ".join(each.description for each in of.clusters),
            "CPU": f"{of.machine.cpu}, {of.machine.cores} cores,",
            "hvpipe bench": of.machine.hvpipe,
            **of.software,
        }
        for of in (there, wanted)
    )
    if changed := differences(before, now):
        raise BenchError(
            f"{folder} was begun with another plan, hosts, machine or software, whose figures should not be "
            f"mixed with new ones: give another --out. Received: {', '.join(changed)}"
        )
