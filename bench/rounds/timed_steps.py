"""Which timed steps count, and the standard errors of their median and mean."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from bench.metrics import relative_spread
from bench.rounds.record import Round, Task

_FEWEST = 2  # with no more steps than these, all count


def counted(task: Task, step_s: Sequence[float]) -> list[float]:
    """Return the timed steps of a rank that count: all but a round's first one, for every system alike.

    Timed steps are a run of their own, which begins with nothing left over. A system that collects gradients
    in the next step has nothing to collect in the first, so that one is too short. Epochs are timed from
    within a run, so all their steps are complete.
    """
    return list(step_s if task.epochs or len(step_s) <= _FEWEST else step_s[1:])


def counted_steps(rounds: Sequence[Round], rank: int) -> list[float]:
    """Return the counted steps of a rank in all rounds of a case."""
    return [step for each in rounds for step in counted(each.case.task, each.ranks[rank].step_s)]


def slowest_rank(rounds: Sequence[Round]) -> int:
    """Return the rank with the longest median step in the rounds of a case."""
    return max(range(len(rounds[0].ranks)), key=lambda rank: statistics.median(counted_steps(rounds, rank)))


def steps_noise(rounds: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the median of all steps.

    It is the larger of two estimates: from the quartiles of the steps, and half the distance between the
    medians of the rounds.
    """
    steps = [step for each in rounds for step in each]
    # Half the distance between quartiles is 0.6745 sigma; the error of a median is 1.2533 sigma / sqrt(n).
    by_steps = relative_spread(steps) / 0.6745 * 1.2533 / math.sqrt(len(steps))
    return max(by_steps, _between([statistics.median(each) for each in rounds]))


def mean_noise(rounds: Sequence[Sequence[float]]) -> float:
    """Return the relative standard error of the mean of all steps."""
    steps = [step for each in rounds for step in each]
    by_steps = statistics.pstdev(steps) / statistics.fmean(steps) / math.sqrt(len(steps))
    return max(by_steps, _between([statistics.fmean(each) for each in rounds]))


def _between(rounds: Sequence[float]) -> float:
    """Return half the distance between the rounds' figures, relative to their median."""
    return (max(rounds) - min(rounds)) / 2 / statistics.median(rounds)
