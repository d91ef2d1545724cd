"""Runs a suite, round after round, and keeps everything; a later run continues where one was interrupted."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from bench.evaluation.host_selection import HostSelection
from bench.evaluation.outcome import EvaluationOutcome, Journal, Setting
from bench.evaluation.suite import Group, Suite
from bench.hosts import links
from bench.hosts.hardware import describe_hardware
from bench.hosts.hosts import Hosts
from bench.hosts.rank_benchmark import say
from bench.metrics import format_time
from bench.rounds.record import NOT_UP, Case, Round, Task
from hvpipe.errors import HvpipeError

RunRound = Callable[[Case, int, Hosts, float], Round]
"""Runs one round of a case: case, number, hosts, seconds until it is ended."""

_OUTPUT_END = 4000


def setting_of(suite: Suite, selection: HostSelection, software: Mapping[str, str] | None = None) -> Setting:
    """Return what is kept about a run before it begins. `suite` fits the selection."""
    groups = {each.cluster: each for each in suite.groups}
    return Setting(
        suite.name,
        suite.title,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        describe_hardware(),
        tuple(map(selection.facts, groups.values())),
        json.loads(json.dumps(asdict(suite))),
        (*((selection.note,) if selection.note else ()), *suite.notes),
        dict(software or {}),
    )


@dataclass(frozen=True)
class Evaluation:
    """One run of a suite into a folder. If the folder has some rounds already, it runs the missing ones.

    `suite` fits the selection, `missing` says by name why a system cannot run here, `software` is from
    describe_software.
    """

    suite: Suite
    selection: HostSelection
    run_round: RunRound
    missing: Mapping[str, str]
    software: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """Return what would run, a line for each group, and why systems are skipped."""
        lines = [*([self.selection.note] if self.selection.note else []), *self.suite.notes]
        for group in self.suite.groups:
            task = group.task.describe([group.rounds_of(system) for system in group.systems])
            lines.append(f"{group.name}: {len(group.systems)} systems, {task}")
        return "\n".join([*lines, *(f"skipped: {why}" for why in self.missing.values())])

    def run(self, folder: Path, *, retry_failed: bool = False) -> EvaluationOutcome:
        """Run what is missing in the folder. KeyboardInterrupt leaves it with all finished rounds kept.

        Cases whose hosts were not up count as missing, and with `retry_failed` failed cases do too.
        """
        with Journal(folder, setting_of(self.suite, self.selection, self.software)) as journal:
            began = journal.outcome
            given_up = {each.case for each in began.rounds if each.error and not retry_failed}
            if not self._left(journal, given_up, self.suite.groups):
                say(f"no round is left to run in {folder}, begun {began.setting.started}")
            for group in self.suite.groups:
                self._skip_missing(group, journal)
                if self._left(journal, given_up, [group]):
                    self._run_group(group, journal, given_up, retry_failed)
            return journal.outcome

    def _left(self, journal: Journal, given_up: set[Case], groups: Sequence[Group]) -> list[tuple[int, Case]]:
        """Return the turns still to run: no others of a case that failed, which would fail again."""
        done = {(each.number, each.case) for each in journal.outcome.rounds if each.ok}
        turns = (turn for group in groups for turn in group.turns())
        return [
            (number, case)
            for number, case in turns
            if case.system not in self.missing and case not in given_up and (number, case) not in done
        ]

    def _skip_missing(self, group: Group, journal: Journal) -> None:
        for case in (group.case(system) for system in group.systems if system in self.missing):
            if not any(each.case == case for each in journal.outcome.rounds):
                journal.add(Round(case, 0, skipped=self.missing[case.system]))
            say(f"{case.key}: skipped, {self.missing[case.system]}")

    def _run_group(self, group: Group, journal: Journal, given_up: set[Case], retry_failed: bool) -> None:
        def tell(what: str) -> None:
            say(f"[{len(self._left(journal, given_up, self.suite.groups))} rounds left] {what}")

        try:
            with self.selection.hosts_of(group) as hosts:
                known = {each.cluster for each in journal.outcome.links if not (each.why and retry_failed)}
                if group.cluster not in known and len(hosts.spec.hosts) > 1:
                    tell(f"{group.cluster}: links")
                    for link in links.measure(hosts, group.cluster):
                        journal.add(link)
                while left := self._left(journal, given_up, [group]):
                    number, case = left[0]
                    tell(f"{case.key}, round {number + 1} of {group.rounds}")
                    finished = self._round(case, number, hosts, _limit_s(case.task))
                    journal.add(finished)
                    if not finished.ok:
                        given_up.add(case)
                    say(_line(finished))
        except HvpipeError as error:
            left = self._left(journal, given_up, [group])
            for number, case in left:
                journal.add(Round(case, number, skipped=f"{NOT_UP}{error}"))
                given_up.add(case)
            said = f"not run, {NOT_UP}{error}" if left else f"measured; its hosts could not be ended: {error}"
            say(f"{group.name}: {said}")

    def _round(self, case: Case, number: int, hosts: Hosts, timeout_s: float) -> Round:
        """Run a round. Every failure of a system ends up in the round."""
        try:
            return self.run_round(case, number, hosts, timeout_s)
        except Exception:
            return Round(case, number, error=traceback.format_exc()[-_OUTPUT_END:])


def _limit_s(task: Task) -> float:
    """Return when a round that has not ended counts as a hang: long after any that trains."""
    return 1800.0 + 10.0 * (task.warm_up + task.steps) + 300.0 * task.all_epochs


def _line(finished: Round) -> str:
    if not finished.ok:
        return f"{finished.case.key}: {'skipped' if finished.skipped else 'failed'}, {finished.why}"
    step_s = max(median(finished.counted(rank)) for rank in range(len(finished.ranks)))
    return f"{finished.case.key}: step {format_time(step_s)}, the round {format_time(finished.taken_s)}"
