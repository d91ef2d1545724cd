"""The outcome of an evaluation (every round and link, and the setting), and the journal that keeps it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.evaluation.software import differences
from bench.hosts.hardware import HostHardware
from bench.hosts.links import LinkFacts
from bench.rounds.record import FORMAT, Round
from hvpipe.atomic_file import atomic_file
from hvpipe.config_file import fingerprint

FILE = "results.json"


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster by name: its description, number of hosts, and the rate that limits a ring through them."""

    name: str
    description: str
    hosts: int
    slowest_bits_per_s: float | None = None


@dataclass(frozen=True)
class Setting:
    """Which suite ran, on what, and since when. A resumed run must have the same `plan`, the suite as data.

    `software` has versions by name (bench.evaluation.software).
    """

    suite: str
    title: str
    started: str  # ISO date and time, UTC
    machine: HostHardware
    clusters: tuple[ClusterFacts, ...]
    plan: dict[str, Any]
    notes: tuple[str, ...] = ()
    software: dict[str, str] = field(default_factory=dict)

    def cluster(self, name: str) -> ClusterFacts:
        return next(each for each in self.clusters if each.name == name)


@dataclass(frozen=True)
class EvaluationOutcome:
    """Everything that an evaluation kept, in the order in which it came."""

    setting: Setting
    rounds: tuple[Round, ...] = ()
    links: tuple[LinkFacts, ...] = ()

    def to_json(self) -> str:
        """Return everything as text for from_json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> EvaluationOutcome:
        """Read what to_json returned. BenchError for other texts."""
        try:
            data = json.loads(text)
            if data["format"] != FORMAT:
                raise BenchError(f"Results should be of format {FORMAT}. Received: {data['format']!r}")
            fields = data["setting"]
            fields["machine"] = HostHardware(**fields["machine"])
            fields["clusters"] = tuple(ClusterFacts(**each) for each in fields["clusters"])
            fields["notes"] = tuple(fields["notes"])
            return EvaluationOutcome(
                Setting(**fields),
                tuple(Round.from_dict(each) for each in data["rounds"]),
                tuple(LinkFacts(**each) for each in data["links"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise BenchError(
                f"Results should be as `hvpipe bench run` writes them. Received: {error!r}"
            ) from error

    @staticmethod
    def read(path: Path) -> EvaluationOutcome:
        """Read results.json, or a folder that has one."""
        file = path / FILE if path.is_dir() else path
        try:
            return EvaluationOutcome.from_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"Results should be a file that can be read. Received: {file}") from error
        except BenchError as error:
            raise BenchError(f"{file}: {error}") from error


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

    def forget(self, *, failed: bool) -> None:
        """Remove what was skipped, and what `failed`, links too, so that it is tried again."""
        rounds = tuple(each for each in self.outcome.rounds if each.ok or (each.error and not failed))
        links = tuple(each for each in self.outcome.links if not (failed and each.why))
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
