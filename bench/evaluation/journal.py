"""The journal of an evaluation: a line of JSON for each finished thing, so that nothing is lost or done
twice.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.evaluation.outcome import (
    EvaluationOutcome,
    PipelineOutcome,
    Setting,
    pipeline_from_dict,
    setting_from_dict,
)
from bench.evaluation.software import differences
from bench.hosts.links import LinkFacts
from bench.rounds.record import Round
from hvpipe.atomic_file import atomic_file

FILE = "journal.jsonl"


class JournalError(RuntimeError):
    """Raised for a journal that belongs to another evaluation, or cannot be read."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Make the folder and lock it until the block or the process ends. JournalError if another process has
    it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system may have no locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise JournalError(
                    f"One evaluation at a time may run in a folder. Received: {folder}, in use by another"
                ) from error
        yield
    finally:
        os.close(handle)


class Journal:
    """Appends to a folder's journal. On an existing one it continues after the last complete line."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        """Begin, or continue a journal of the same plan. JournalError if the plan is another."""
        self._path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        whole = _whole_lines(self._path)
        if whole:
            self.outcome = _outcome(self._path, whole)
            _require_same(folder, self.outcome.setting, setting)
            # Cut off a line that was not complete when the machine stopped.
            os.truncate(self._path, sum(len(line) for line in whole))
        else:
            self.outcome = EvaluationOutcome(setting)
            self._path.write_bytes(_line("setting", asdict(setting)))

    @staticmethod
    def kept_in(folder: Path) -> EvaluationOutcome | None:
        """Return the content of a folder's journal, perhaps of an interrupted run; None without a journal."""
        whole = _whole_lines(folder / FILE)
        return _outcome(folder / FILE, whole) if whole else None

    def add_round(self, finished: Round) -> None:
        """Append a round."""
        self._append("round", finished.to_dict())
        self.outcome = replace(self.outcome, rounds=(*self.outcome.rounds, finished))

    def add_links(self, found: list[LinkFacts]) -> None:
        """Append the measured links of a cluster."""
        for each in found:
            self._append("link", asdict(each))
        self.outcome = replace(self.outcome, links=(*self.outcome.links, *found))

    def add_pipeline(self, finished: PipelineOutcome) -> None:
        """Append a pipeline run."""
        self._append("pipeline", asdict(finished))
        self.outcome = replace(self.outcome, pipelines=(*self.outcome.pipelines, finished))

    def forget_not_up(self) -> None:
        """Remove cases that did not run because their hosts were not up, so that they run again."""
        self._rewrite(
            replace(
                self.outcome,
                rounds=tuple(each for each in self.outcome.rounds if not each.not_up),
                pipelines=tuple(each for each in self.outcome.pipelines if not each.not_up),
            )
        )

    def forget_failed(self) -> None:
        """Remove what failed, including links that could not be measured, so that it runs again."""
        self._rewrite(
            replace(
                self.outcome,
                rounds=tuple(each for each in self.outcome.rounds if not each.error),
                links=tuple(each for each in self.outcome.links if not each.why),
                pipelines=tuple(each for each in self.outcome.pipelines if not each.error),
            )
        )

    def _rewrite(self, kept: EvaluationOutcome) -> None:
        """Replace the journal: whenever this process ends, either journal is complete."""
        if kept == self.outcome:
            return
        lines = [_line("setting", asdict(kept.setting))]
        lines += [_line("round", each.to_dict()) for each in kept.rounds]
        lines += [_line("link", asdict(each)) for each in kept.links]
        lines += [_line("pipeline", asdict(each)) for each in kept.pipelines]
        with atomic_file(self._path, sync=True) as file:
            file.writelines(lines)
        self.outcome = kept

    def _append(self, kind: str, data: dict[str, Any]) -> None:
        with self._path.open("ab") as file:
            file.write(_line(kind, data))
            file.flush()
            os.fsync(file.fileno())


def _line(kind: str, data: dict[str, Any]) -> bytes:
    return json.dumps({"kind": kind, **data}).encode() + b"\n"


def _whole_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _outcome(path: Path, lines: list[bytes]) -> EvaluationOutcome:
    try:
        entries = [json.loads(line) for line in lines]
        kinds = [entry.pop("kind") for entry in entries]
        of = {kind: [e for k, e in zip(kinds, entries, strict=True) if k == kind] for kind in set(kinds)}
        return EvaluationOutcome(
            setting_from_dict(of["setting"][0]),
            tuple(Round.from_dict(each) for each in of.get("round", [])),
            tuple(LinkFacts.from_dict(each) for each in of.get("link", [])),
            tuple(pipeline_from_dict(each) for each in of.get("pipeline", [])),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise JournalError(f"{path} should be a journal of an evaluation. Received: {error!r}") from error


def _require_same(folder: Path, there: Setting, wanted: Setting) -> None:
    if there.plan != wanted.plan:
        raise JournalError(
            f"{folder} holds the results of another plan (suite {there.suite!r}, of {there.started}): "
            f"continue with that one, or give another --out. Received: suite {wanted.suite!r}"
        )
    if there.clusters != wanted.clusters:
        began, now = ("; ".join(each.description for each in of.clusters) for of in (there, wanted))
        raise JournalError(
            f"{folder} was begun on other hosts ({began}): give another --out. Received: {now}"
        )
    if there.machine.cpu != wanted.machine.cpu or there.machine.cores != wanted.machine.cores:
        raise JournalError(
            f"{folder} was begun on another machine ({there.machine.describe()}): give another --out. "
            f"Received: {wanted.machine.describe()}"
        )
    before, now = ({"hvpipe bench": of.machine.hvpipe, **of.software} for of in (there, wanted))
    if changed := differences(before, now):
        raise JournalError(
            f"{folder} was begun with other software, whose figures should not be mixed with new ones: "
            f"give another --out, or use the software that it was begun with. Received: {', '.join(changed)}"
        )
