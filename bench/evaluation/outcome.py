"""The outcome of an evaluation (every round and link, and the setting), and the file that keeps it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.hosts.hardware import HostHardware
from bench.hosts.links import LinkFacts
from bench.rounds.record import Case, Round, Task, from_dict
from hvpipe.config_file import fingerprint

FILE = "results.jsonl"


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

    @staticmethod
    def read(path: Path) -> EvaluationOutcome:
        """Read results.jsonl, or a folder that has one."""
        file = path / FILE if path.is_dir() else path
        try:
            return _parsed(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"Results should be a file that can be read. Received: {file}") from error
        except BenchError as error:
            raise BenchError(f"{file}: {error}") from error

    @staticmethod
    def joined(outcomes: Sequence[EvaluationOutcome]) -> EvaluationOutcome:
        """Return one outcome of all groups of cases, each from one run, with a note if software differs.

        Raises:
            BenchError: A group is in two of the runs, or they were not on the same machine and clusters.
        """
        first = outcomes[0]
        if len(outcomes) == 1:
            return first
        clusters = {each.name: each for outcome in outcomes for each in outcome.setting.clusters}
        seen: set[str] = set()
        facts: dict[str, str] = {}
        for outcome in outcomes:
            groups, setting = {each.case.group for each in outcome.rounds}, outcome.setting
            if twice := sorted(seen & groups):
                raise BenchError(f"Each case should be in one of the runs. Received: {twice[0]}, twice")
            seen |= groups
            machine = f"{setting.machine.cpu} with {setting.machine.cores} cores"
            for name, fact in [("", machine), *((each.name, each.description) for each in setting.clusters)]:
                if (other := facts.setdefault(name, fact)) != fact:
                    raise BenchError(
                        f"The runs should be of one machine and its clusters. Received: {other}; and {fact}"
                    )
        plan = {**first.setting.plan, "groups": [*_planned(outcomes).values()]}
        notes = tuple(
            dict.fromkeys([*(note for of in outcomes for note in of.setting.notes), *_software(outcomes)])
        )
        return EvaluationOutcome(
            replace(first.setting, clusters=tuple(clusters.values()), plan=plan, notes=notes),
            tuple(round_ for of in outcomes for round_ in of.rounds),
            tuple(link for of in outcomes for link in of.links),
        )


def _software(outcomes: Sequence[EvaluationOutcome]) -> Iterator[str]:
    """Yield a sentence for each software of which the runs had different versions."""
    for name in dict.fromkeys(name for of in outcomes for name in of.setting.software):
        versions = [of.setting.software.get(name, "unknown") for of in outcomes]
        if len(set(versions)) > 1:
            yield f"The runs had different versions of {name}: {', '.join(versions)}."


def _planned(outcomes: Sequence[EvaluationOutcome]) -> dict[str, dict[str, Any]]:
    """Return the planned groups of cases by key, each as in the run that has measured it."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        measured = {each.case.group for each in outcome.rounds}
        for group in outcome.setting.plan.get("groups", []):
            case = Case("", group["cluster"], group["ranks"], from_dict(Task, group["task"]))
            if case.group in measured or case.group not in found:
                found[case.group] = group
    return found


def _parsed(text: str) -> EvaluationOutcome:
    """Read a line for the setting, and one for each round and link. A later one replaces an earlier one.

    The last line is left out if it does not end: its process was killed meanwhile.
    """
    rounds: dict[tuple[Case, int], Round] = {}
    links: dict[tuple[str, str], LinkFacts] = {}
    try:
        first, *lines = text.split("\n")[:-1]
        setting = from_dict(Setting, json.loads(first))
        for line in map(json.loads, lines):
            if "case" in line:
                round_ = from_dict(Round, line)
                rounds[round_.case, round_.number] = round_
            else:
                link = from_dict(LinkFacts, line)
                links[link.cluster, link.second] = link
        return EvaluationOutcome(setting, tuple(rounds.values()), tuple(links.values()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BenchError(
            f"Results should be as `hvpipe bench run` writes them. Received: {error!r}"
        ) from error


class Journal:
    """Keeps an evaluation in a folder until its block ends. Lines are only added, so none is ever lost."""

    def __init__(self, folder: Path, setting: Setting) -> None:
        """Begin, or continue a journal of the same plan. BenchError if the plan is another, or a process
        has it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / FILE).open("a+", encoding="utf-8")
        try:
            self._lock(folder)
            self._file.seek(0)
            if found := self._file.read():
                _require_same(folder, EvaluationOutcome.read(folder).setting, setting)
            self._text = found[: found.rfind("\n") + 1]
            self._file.truncate(len(self._text.encode()))
            if not self._text:
                self.add(setting)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def _lock(self, folder: Path) -> None:
        with suppress(OSError):  # the file system may have no locks
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BenchError(
                    f"One evaluation at a time may run in a folder. Received: {folder}, in use by another"
                ) from error

    @property
    def outcome(self) -> EvaluationOutcome:
        return _parsed(self._text)

    def add(self, record: Setting | Round | LinkFacts) -> None:
        line = json.dumps(asdict(record), separators=(",", ":")) + "\n"
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._text += line


def _require_same(folder: Path, there: Setting, wanted: Setting) -> None:
    """Raise BenchError, which names what differs, if figures of both should not be mixed.

    Packages that only one of them has do not count.
    """
    before, now = (
        {
            "plan": f"{fingerprint(of.plan)} of suite {of.suite!r}",
            "on": "; ".join(each.description for each in of.clusters),
            "CPU": f"{of.machine.cpu}, {of.machine.cores} cores,",
            **of.software,
        }
        for of in (there, wanted)
    )
    changed = [
        f"{name} {before[name]} (now {now[name]})"
        for name in before
        if name in now and before[name] != now[name]
    ]
    if changed:
        raise BenchError(
            f"{folder} was begun with another plan, hosts, machine or software, whose figures should not be "
            f"mixed with new ones: give another --out. Received: {', '.join(changed)}"
        )
