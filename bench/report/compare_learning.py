"""What trainings by epochs learned in two evaluations: the last loss and accuracy of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.evaluation.outcome import EvaluationOutcome
from bench.metrics import table
from bench.rounds.record import Round

_ERRORS = 2.0  # standard errors of the difference of two accuracies
_WORSE_LOSS = 2.0  # factor; equal trainings differ by rounding, asynchronous ones by some tenths
_HELD_OUT = 360  # held-out images: a fifth of 1,797


@dataclass(frozen=True)
class Learning:
    """One training before and after.

    It is worse if its loss doubled or is NaN, or if its accuracy on the held-out images fell by more than
    chance.
    """

    key: str
    verdict: Literal["worse", "better", "the same"]
    before_loss: float
    after_loss: float
    before_accuracy: float
    after_accuracy: float


def compare_learning(before: EvaluationOutcome, after: EvaluationOutcome) -> tuple[Learning, ...]:
    """Compare every training that both have, of the same task."""
    old, new = _trained(before), _trained(after)
    same = [key for key in old if key in new and old[key].case.task == new[key].case.task]
    return tuple(_learning(old[key], new[key]) for key in same)


def learning_table(learning: Sequence[Learning]) -> str:
    """Return a table for people, worse trainings first."""
    rows = [
        [
            each.key,
            *(f"{loss:.4g}" for loss in (each.before_loss, each.after_loss)),
            *(f"{accuracy:.1%}" for accuracy in (each.before_accuracy, each.after_accuracy)),
            each.verdict,
        ]
        for each in sorted(learning, key=lambda each: each.verdict != "worse")
    ]
    return table(["training", "loss before", "after", "accuracy before", "after", "verdict"], rows)


def _trained(outcome: EvaluationOutcome) -> dict[str, Round]:
    """Return by key the first good round that has losses."""
    found: dict[str, Round] = {}
    for each in outcome.rounds:
        if each.ok and each.ranks[0].loss and each.ranks[0].accuracy:
            found.setdefault(each.case.key, each)
    return found


def _learning(old: Round, new: Round) -> Learning:
    loss = [each.ranks[0].loss[-1] for each in (old, new)]
    accuracy = [each.ranks[0].accuracy[-1] for each in (old, new)]
    middle = sum(accuracy) / 2
    allowed = _ERRORS * math.sqrt(2 * middle * (1 - middle) / _HELD_OUT)
    verdict: Literal["worse", "better", "the same"] = "the same"
    if not _within(loss[1], loss[0]) or accuracy[1] < accuracy[0] - allowed:
        verdict = "worse"
    elif not _within(loss[0], loss[1]) or accuracy[1] > accuracy[0] + allowed:
        verdict = "better"
    return Learning(old.case.key, verdict, *loss, *accuracy)


def _within(loss: float, reference: float) -> bool:
    """Return whether a loss is a number and not much above the reference. NaN is above everything."""
    return not math.isnan(loss) and (math.isnan(reference) or loss <= _WORSE_LOSS * reference)
