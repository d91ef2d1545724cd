"""Runs a suite: group after group on its hosts, with the systems in turn. Every round is kept as it ends."""

from __future__ import annotations

import json
import subprocess
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

from bench.evaluation.host_selection import HostSelection
from bench.evaluation.journal import Journal, alone_in
from bench.evaluation.outcome import EvaluationOutcome, Setting
from bench.evaluation.progress import EvaluationProgress
from bench.evaluation.suite import Group, Suite
from bench.hosts import links
from bench.hosts.hardware import describe_hardware
from bench.hosts.hosts import Hosts
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


class Evaluation:
    """One run of a suite into a folder. If the folder has some rounds already, it runs the missing ones."""

    def __init__(
        self,
        suite: Suite,
        selection: HostSelection,
        run_round: RunRound,
        missing: Mapping[str, str],
        software: Mapping[str, str] | None = None,
    ) -> None:
        """`suite` fits the selection, `missing` says by name why a system cannot run here, `software` is from
        describe_software.
        """
        self._suite = suite
        self._selection = selection
        self._run_round = run_round
        self._missing = missing
        self._software = software

    def rounds(self) -> int:
        """Return the number of rounds of all groups."""
        return sum(len(group.turns()) for group in self._suite.groups)

    def describe(self) -> str:
        """Return what would run, a line for each group, and why systems are skipped."""
        lines = [*([self._selection.note] if self._selection.note else []), *self._suite.notes]
        for group in self._suite.groups:
            task = group.task.describe([group.rounds_of(system) for system in group.systems])
            lines.append(f"{group.name}: {len(group.systems)} systems, {task}")
        asked = {system for group in self._suite.groups for system in group.systems}
        lines += [f"skipped: {why}" for system, why in self._missing.items() if system in asked]
        return "\n".join(lines)

    def run(
        self, folder: Path, progress: EvaluationProgress, *, retry_failed: bool = False
    ) -> EvaluationOutcome:
        """Run what is missing in the folder. KeyboardInterrupt leaves it with all finished rounds kept.

        Cases whose hosts were not up count as missing, and with `retry_failed` failed cases do too.
        """
        with alone_in(folder):
            journal = Journal(folder, setting_of(self._suite, self._selection, self._software))
            journal.forget_not_up()
            if retry_failed:
                journal.forget_failed()
            kept = journal.outcome
            for group in self._suite.groups:
                self._run_group(group, journal, progress)
            if journal.outcome is kept:
                progress.say(f"nothing left to run: {folder} has all rounds, begun {kept.setting.started}")
            return journal.outcome

    def _run_group(self, group: Group, journal: Journal, progress: EvaluationProgress) -> None:
        kept = journal.outcome
        left = [turn for turn in group.turns() if not _done(kept, *turn) and not _gave_up(kept, turn[1])]
        for case in dict.fromkeys(case for _, case in left if case.system in self._missing):
            if not any(each.case.key == case.key for each in journal.outcome.rounds):
                journal.add_round(Round(case, 0, skipped=self._missing[case.system]))
            progress.say(f"{case.key}: skipped, {self._missing[case.system]}")
        left = [(number, case) for number, case in left if case.system not in self._missing]
        progress.leave_out(len(group.turns()) - len(left))
        if not left:
            return
        try:
            with self._selection.hosts_of(group) as hosts:
                self._measure_links(group.cluster, hosts, journal, progress)
                for number, case in left:
                    if _gave_up(journal.outcome, case):
                        progress.leave_out(1)
                        continue
                    progress.working_on(f"{case.key}, round {number + 1} of {group.rounds}")
                    finished = self._round(case, number, hosts, _limit_s(case.task))
                    journal.add_round(finished)
                    progress.done()
                    progress.say(_line(finished))
        except HvpipeError as error:
            outcome = journal.outcome
            left = [turn for turn in left if not _done(outcome, *turn) and not _gave_up(outcome, turn[1])]
            for number, case in left:
                journal.add_round(Round(case, number, skipped=f"{NOT_UP}{error}"))
                progress.leave_out(1)
            said = f"not run, {NOT_UP}{error}" if left else f"measured; its hosts could not be ended: {error}"
            progress.say(f"{group.name}: {said}")

    def _round(self, case: Case, number: int, hosts: Hosts, timeout_s: float) -> Round:
        """Run a round. Every failure of a system ends up in the round."""
        try:
            return self._run_round(case, number, hosts, timeout_s)
        except subprocess.TimeoutExpired as error:
            output = error.stderr or error.output or ""
            text = output if isinstance(output, str) else output.decode(errors="replace")
            return Round(case, number, error=f"no end within {timeout_s:.0f} s\n{text[-_OUTPUT_END:]}")
        except Exception:
            return Round(case, number, error=traceback.format_exc()[-_OUTPUT_END:])

    def _measure_links(
        self, cluster: str, hosts: Hosts, journal: Journal, progress: EvaluationProgress
    ) -> None:
        known = any(each.cluster == cluster for each in journal.outcome.links)
        if known or len(hosts.spec.hosts) < 2:
            return
        progress.working_on(f"{cluster}: links")
        journal.add_links(links.measure(hosts, cluster))


def _limit_s(task: Task) -> float:
    """Return when a round that has not ended counts as a hang: long after any that trains."""
    return 1800.0 + 10.0 * (task.warm_up + task.steps) + 300.0 * task.epochs


def _done(outcome: EvaluationOutcome, number: int, case: Case) -> bool:
    """Return whether this round ran. Skipped rounds are tried again."""
    return any(
        each.case.key == case.key and each.number == number and not each.skipped for each in outcome.rounds
    )


def _gave_up(outcome: EvaluationOutcome, case: Case) -> bool:
    """Return whether the case failed: a crash or a hang would repeat in every round."""
    return any(each.case.key == case.key and each.error for each in outcome.rounds)


def _line(finished: Round) -> str:
    if not finished.ok:
        return f"{finished.case.key}: {'skipped' if finished.skipped else 'failed'}, {finished.why}"
    step_s = max(median(finished.counted(rank)) for rank in range(len(finished.ranks)))
    return f"{finished.case.key}: step {format_time(step_s)}, the round {format_time(finished.taken_s)}"
