"""The parts of a step of all systems of a group, on the same rank, compared with computing alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.rounds.record import RankRound, Round
from bench.rounds.step_breakdown import ALONE, against_alone, tells_computing
from bench.rounds.timed_steps import slowest_rank
from hvpipe.trace.computing_time import COMPUTE

_INSIDE = ("input", "communication_hidden")  # neither computing nor beyond it


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part on a `rank`, and how many of them are beyond that rank's computing alone.

    `longest_wait_s` is the wait for the slowest rank, of the rank that waits longest; None if the system does
    not tell.
    """

    rank: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    beyond_alone_s: float | None = None
    longest_wait_s: float | None = None


def computing_alone(rounds: Iterable[Round]) -> dict[str, Round]:
    """Return by group a round of all ranks computing alone, with the mean of each part over such rounds."""
    found: dict[str, list[Round]] = {}
    for each in rounds:
        if each.ok and each.case.system == ALONE and tells_computing(each):
            found.setdefault(each.case.group, []).append(each)
    return {group: _mean_round(good) for group, good in found.items()}


def ranks_of_parts(cases: Iterable[list[Round]]) -> dict[str, int]:
    """Return by group the rank whose parts are shown for all its systems.

    It is the slowest when computing alone, else the slowest of the first system. Synchronous ranks have the
    same step, so each system's own slowest rank would be chosen by chance.
    """
    found: dict[str, int] = {}
    for rounds in sorted(cases, key=lambda rounds: rounds[0].case.system != ALONE):
        found.setdefault(rounds[0].case.group, slowest_rank(rounds))
    return found


def parts_of(rounds: Sequence[Round], rank: int, alone: Round | None) -> Parts:
    """Return means over the rounds of a case. What a system cannot tell follows from computing alone."""
    told = [against_alone(each, alone) for each in rounds] if alone else rounds
    seconds = _mean_parts([each.ranks[rank] for each in told])
    wait_s = _longest_wait_s(rounds)
    if alone is None or rounds[0].case.system == ALONE:
        return Parts(rank, seconds, longest_wait_s=wait_s)
    whole_s = sum(s for part, s in seconds.items() if part not in _INSIDE)
    alone_s = sum(alone.ranks[rank].parts_s[part] for part in COMPUTE)
    return Parts(rank, seconds, max(0.0, whole_s - alone_s), wait_s)


def _longest_wait_s(rounds: Sequence[Round]) -> float | None:
    """Return the mean wait for the slowest rank, of the rank that waits longest."""
    if not all("straggler" in rank.parts_s for each in rounds for rank in each.ranks):
        return None
    by_rank = zip(*([rank.parts_s["straggler"] for rank in each.ranks] for each in rounds), strict=True)
    return max(map(statistics.fmean, by_rank), default=None)


def _mean_round(rounds: Sequence[Round]) -> Round:
    ranks = tuple(
        replace(rank, parts_s=_mean_parts([each.ranks[number] for each in rounds]))
        for number, rank in enumerate(rounds[0].ranks)
    )
    return replace(rounds[0], ranks=ranks)


def _mean_parts(ranks: Sequence[RankRound]) -> dict[str, float]:
    """Return the mean of each part that every round has."""
    known = set.intersection(*(set(rank.parts_s) for rank in ranks))
    return {part: statistics.fmean(rank.parts_s[part] for rank in ranks) for part in known}
