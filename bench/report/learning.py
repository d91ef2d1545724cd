"""How long each system takes to learn as much as exact training does, in trainings by epochs.

The rounds of such a case have different seeds. Time is that of steps: evaluations do not count.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import accumulate

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import format_time
from bench.rounds.record import Round
from bench.systems import is_exact

SHARE = 0.98  # of the last accuracy of exact training with the same seed, to be reached


@dataclass(frozen=True)
class Learned:
    """What a system learned in its rounds. `to_target_s` is None for rounds that miss the target."""

    system: str
    last: tuple[float, ...]  # the accuracy after as many epochs as exact training has, of each round
    to_target_s: tuple[float | None, ...]

    @property
    def reaches(self) -> bool:
        """Whether every round reaches the target."""
        return None not in self.to_target_s

    @property
    def seconds(self) -> float:
        """The median time to the target; infinite if a round does not reach it."""
        return (
            statistics.median([each for each in self.to_target_s if each is not None])
            if self.reaches
            else float("inf")
        )

    def describe(self) -> str:
        """Return the time to the target in words, with the range over the rounds."""
        times = sorted(each for each in self.to_target_s if each is not None)
        if not self.reaches:
            return f"reached in {len(times)} of {len(self.to_target_s)}"
        if len(times) == 1:
            return f"{format_time(times[0])}, one seed"
        return f"{format_time(self.seconds)} ({format_time(times[0])} to {format_time(times[-1])})"


def learning(outcome: EvaluationOutcome) -> dict[str, tuple[float, list[Learned]]]:
    """Return by group the accuracy to reach and what each system learned, the fastest first.

    Each seed has a target of its own. This is their median, and the target of seeds without exact training.
    """
    groups: dict[str, dict[str, list[Round]]] = {}
    for each in outcome.rounds:
        if each.ok and each.ranks[0].accuracy:
            groups.setdefault(each.case.group, {}).setdefault(each.case.system, []).append(each)
    found = {}
    for group, systems in groups.items():
        exact: dict[int, list[float]] = {}
        for name, rounds in systems.items():
            for each in rounds if is_exact(name) else ():
                exact.setdefault(each.number, []).append(_last(each))
        if not exact:
            continue
        targets = {number: SHARE * statistics.median(last) for number, last in exact.items()}
        usual = statistics.median(targets.values())
        learned = [
            Learned(
                name,
                tuple(map(_last, rounds)),
                tuple(seconds_to(each, targets.get(each.number, usual)) for each in rounds),
            )
            for name, rounds in systems.items()
        ]
        found[group] = (usual, sorted(learned, key=lambda each: each.seconds))
    return found


def ends_of_epochs_s(round_: Round) -> list[float]:
    """Return the seconds of training until the end of each epoch, of the slowest rank.

    Steps of the warm-up, which traces, count as the mean of all others.
    """
    epochs = round_.case.task.all_epochs
    steps = max((rank.step_s for rank in round_.ranks), key=sum)
    per_epoch = -(-(len(steps) + round_.case.task.warm_up) // epochs)
    missing = per_epoch * epochs - len(steps)
    every = [statistics.fmean(steps)] * missing + list(steps)
    return list(accumulate(sum(every[at : at + per_epoch]) for at in range(0, len(every), per_epoch)))


def seconds_to(round_: Round, target: float) -> float | None:
    """Return when an epoch ends that reaches an accuracy; None if none does."""
    ends = zip(ends_of_epochs_s(round_), round_.ranks[0].accuracy, strict=True)
    return next((at for at, accuracy in ends if accuracy >= target), None)


def _last(round_: Round) -> float:
    return round_.ranks[0].accuracy[round_.case.task.epochs - 1]
