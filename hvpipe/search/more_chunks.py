"""Tries more stages on each device than the search does: a last move of the best pipelines."""

from __future__ import annotations

from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group
from hvpipe.search.judge import Judge, Judged
from hvpipe.search.layout import StageLayout
from hvpipe.search.moves import Moves, settle
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.starts import Starts

# Other numbers of chunks than the usual 2.
_CHUNKS = (3, 4, 6, 8)
# How many top pipelines to cut again, each with a different number of stages.
_PIPELINES = 4
# How many of the cuts for a number of chunks are simulated. Those settle whose step is below this multiple of
# the best.
_SIMULATED, _NEAR = 2, 1.03
# The work for this, as a part of that of the search; with many devices, less.
_PART, _PART_OF_MANY = 5, 20


def try_more_chunks(judge: Judge, budget: int) -> None:
    """Cut the best pipelines into more stages for each device, and improve what is fast.

    The search itself tries one number of chunks, as more of them pay seldom: their transfers must be short,
    and the bubble long. The judge's best layouts are the result.

    Args:
        judge: The judge after a search.
        budget: The work of that search.
    """
    layers = len(judge.profile.layers)
    all_groups = _best_groups(judge)
    if not all_groups or min(map(len, all_groups)) * min(_more_chunks(judge.choice), default=layers) > layers:
        return
    judge.left = max(judge.left, 0) + budget // (_PART_OF_MANY if judge.many else _PART)
    starts = Starts(judge, None, ("pipeline",))
    moves = Moves(judge, starts, False, ("pipeline",))
    found: list[Judged] = []
    for groups in all_groups:
        for chunks in _more_chunks(judge.choice):
            found += _cut(judge, starts, groups, chunks)
    found.sort(key=lambda one: one.step_s)
    for one in found:
        best = judge.best["pipeline"]
        if judge.left > 0 and one.step_s < _NEAR * best.step_s:
            settle(judge, moves, one)


def _more_chunks(choice: PipeliningChoice) -> tuple[int, ...]:
    """Return the numbers of chunks to try; none if the number is fixed."""
    return _CHUNKS if choice.schedule == "auto" and choice.chunks == 2 else ()


def _best_groups(judge: Judge) -> list[tuple[Group, ...]]:
    """Return the devices of the fastest pipelines of each number of devices."""
    firsts: dict[int, tuple[Group, ...]] = {}
    for one in judge.fastest("pipeline"):
        if len(one.layout.groups) > 1:
            firsts.setdefault(len(one.layout.groups), one.layout.groups)
    return list(firsts.values())[:_PIPELINES]


def _cut(judge: Judge, starts: Starts, groups: tuple[Group, ...], chunks: int) -> list[Judged]:
    """Judge the most promising cuts with this number of chunks."""
    choice = judge.choice
    how = Pipelining("interleaved", choice.microbatches, choice.fixed_recompute, chunks)
    if len(groups) * chunks > len(judge.profile.layers) or len(groups) > how.microbatches:
        return []
    layouts: dict[StageLayout, None] = dict.fromkeys(starts.cut(groups, how))
    judged = (
        judge.judge(layout, judge.best["pipeline"])
        for layout in sorted(layouts, key=judge.promise)[:_SIMULATED]
    )
    return [one for one in judged if one is not None and one.fits]
