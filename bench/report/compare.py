"""Compares two evaluations: what became slower, worse or faster by more than the noise of both.

Steps differ more between rounds, which are fresh processes, than within a round. So a case's noise is at
least that of all cases with several rounds together, divided by the root of its own number of rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from bench.evaluation.outcome import EvaluationOutcome
from bench.evaluation.software import differences
from bench.metrics import format_time, table
from bench.report.figures import all_figures, failed_cases, not_measured

LEAST_CHANGE = 0.05  # smaller changes are never reported
BETWEEN_ROUNDS = (
    0.05  # a round's standard deviation, if too few cases show it; 10 cases of the suite `full`: 0.055
)
_LEAST_REPEATED = 4  # cases with several rounds that show the deviation
_FALSE_ALARMS = 0.05  # the chance that any case of two equal evaluations is called slower or faster

Verdict = Literal["slower", "faster", "the same", "failed", "not run", "new", "another task"]
_ORDER: tuple[Verdict, ...] = ("slower", "failed", "not run", "another task", "faster", "new", "the same")


@dataclass(frozen=True)
class Change:
    """A case before and after. Ratios within `allowed` of 1 mean nothing.

    "another task" (other threads, steps or seed) has no ratio, because the two cannot be compared. "failed"
    means that it did not fail before. "not run" means that it was not asked for, was skipped or has not run
    yet; `why` has the reason.
    """

    key: str
    verdict: Verdict
    before_s: float | None = None
    after_s: float | None = None
    ratio: float | None = None
    allowed: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Differences:
    """All changes.

    `same_machine` is False if figures should not be compared, because the machine or a cluster of
    the same name is another. `software` names differences, as "keras 3.14 (now 3.15)". `between_rounds` is
    the standard deviation of a round's step. `single_rounds` is the number of changes that rest on a single
    round.
    """

    changes: tuple[Change, ...]
    same_machine: bool
    software: tuple[str, ...] = ()
    between_rounds: float = BETWEEN_ROUNDS
    single_rounds: int = 0

    @property
    def regressed(self) -> bool:
        """Whether a case is slower beyond noise, or fails."""
        return any(each.verdict in ("slower", "failed") for each in self.changes)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "regressed": self.regressed}

    def to_text(self) -> str:
        rows = [
            [
                each.key,
                "" if each.before_s is None else format_time(each.before_s),
                "" if each.after_s is None else format_time(each.after_s),
                "" if each.ratio is None else f"{each.ratio:.3f}",
                "" if each.allowed is None else f"{each.allowed:.0%}",
                each.verdict,
            ]
            for each in sorted(self.changes, key=lambda each: _ORDER.index(each.verdict))
        ]
        lines = (
            [] if self.same_machine else ["Measured on different machines or clusters: ratios say little."]
        )
        if self.software:
            lines.append(f"Other software: {'; '.join(self.software)}")
        lines.append(table(["case", "before", "after", "ratio", "noise allows", "verdict"], rows))
        lines += [f"{each.key}: {each.why}" for each in self.changes if each.why]
        if self.single_rounds:
            lines.append(
                f"one round before or after: {self.single_rounds} cases; their noise is that between rounds, "
                f"{self.between_rounds:.1%}"
            )
        ratios = [each.ratio for each in self.changes if each.ratio is not None]
        if ratios:
            lines.append(
                f"geometric mean of the ratios: {statistics.geometric_mean(ratios):.3f}, {len(ratios)} cases"
            )
        counts = {verdict: sum(each.verdict == verdict for each in self.changes) for verdict in _ORDER}
        lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
        return "\n".join(lines)


@dataclass(frozen=True)
class _Measured:
    """What is compared of a case: its step and relative standard error. The `task` must be the same."""

    key: str
    task: object
    step_s: float
    noise: float
    rounds: int


def compare(before: EvaluationOutcome, after: EvaluationOutcome) -> Differences:
    """Compare every case of either."""
    old, new = ({each.key: each for each in _measured(of)} for of in (before, after))
    between = _between_rounds((before, after))
    pairs = [(old[key], new[key]) for key in old.keys() & new.keys()]
    errors = _errors(len(pairs))
    failed = _failed(after).keys() - _failed(before).keys()
    changes = []
    for key in dict.fromkeys((*old, *new)):
        if key in old and (key not in new or key in failed):
            changes.append(_not_there(key, old[key], after))
        else:
            changes.append(_change(key, old.get(key), new.get(key), between, errors))
    single = sum(min(pair[0].rounds, pair[1].rounds) == 1 for pair in pairs)
    machines = [each.setting.machine for each in (before, after)]
    same = (machines[0].cpu, machines[0].cores) == (machines[1].cpu, machines[1].cores)
    names = [{each.name: each.description for each in of.setting.clusters} for of in (before, after)]
    alike = all(names[0][name] == names[1][name] for name in names[0].keys() & names[1].keys())
    return Differences(
        tuple(changes),
        same and alike,
        _other_software(before, after),
        between,
        single,
    )


def _noise_of(measured: _Measured, between: float) -> float:
    return max(measured.noise, between / math.sqrt(measured.rounds))


def _verdict(ratio: float, allowed: float) -> Verdict:
    """Judge a ratio on a logarithmic scale, so that faster and slower count alike."""
    if abs(math.log(ratio)) <= math.log1p(allowed):
        return "the same"
    return "slower" if ratio > 1 else "faster"


def _measured(outcome: EvaluationOutcome) -> Iterator[_Measured]:
    for row in all_figures(outcome):
        yield _Measured(row.case.key, row.case.task, row.step_s, row.noise, row.rounds)


def _between_rounds(outcomes: Sequence[EvaluationOutcome]) -> float:
    """Return the relative standard deviation of a round's step, from all cases with several rounds."""
    squares, freedom, cases = 0.0, 0, 0
    for outcome in outcomes:
        by_round: dict[str, list[float]] = {}
        for number in sorted({each.number for each in outcome.rounds}):
            one = replace(outcome, rounds=tuple(each for each in outcome.rounds if each.number == number))
            for row in all_figures(one):
                by_round.setdefault(row.case.key, []).append(math.log(row.step_s))
        for steps in by_round.values():
            if len(steps) > 1:
                squares += (len(steps) - 1) * statistics.variance(steps)
                freedom, cases = freedom + len(steps) - 1, cases + 1
    return math.sqrt(squares / freedom) if cases >= _LEAST_REPEATED else BETWEEN_ROUNDS


def _errors(cases: int) -> float:
    """Return the standard errors that a ratio may be off by. With more cases the largest is farther off."""
    return statistics.NormalDist().inv_cdf(1 - _FALSE_ALARMS / 2 / max(1, cases))


def _failed(outcome: EvaluationOutcome) -> dict[str, str]:
    """Return the reason by the key of a case."""
    why = not_measured(outcome)
    return {key: why[key] for key in failed_cases(outcome)}


def _not_there(key: str, old: _Measured, after: EvaluationOutcome) -> Change:
    """Return the change of a case that has no figures any more, or failed in one of its rounds."""
    if why := _failed(after).get(key):
        return Change(key, "failed", old.step_s, why=why)
    return Change(key, "not run", old.step_s, why=not_measured(after).get(key, ""))


def _change(key: str, old: _Measured | None, new: _Measured | None, between: float, errors: float) -> Change:
    if old is None or new is None:
        return Change(key, "new", None, None if new is None else new.step_s)
    if old.task != new.task:
        return Change(key, "another task", old.step_s, new.step_s)
    ratio = new.step_s / old.step_s
    allowed = max(LEAST_CHANGE, errors * math.hypot(*(_noise_of(each, between) for each in (old, new))))
    return Change(key, _verdict(ratio, allowed), old.step_s, new.step_s, ratio, allowed)


def _other_software(before: EvaluationOutcome, after: EvaluationOutcome) -> tuple[str, ...]:
    settings = (before.setting, after.setting)
    return tuple(differences(*({"hvpipe bench": each.machine.hvpipe, **each.software} for each in settings)))
