"""The schedules that training runs: the plan's, also for small batches, and one without pipelining."""

from __future__ import annotations

from collections.abc import Sequence

from hvpipe.plan.stage_plan import Plan
from hvpipe.schedule.action import Action
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.schedule.schedule import Schedule


def training_schedule(plan: Plan, microbatches: int) -> Schedule:
    """Return the schedule of a batch that may have fewer samples than the plan has micro-batches.

    An interleaved schedule needs as many micro-batches as ranks. With fewer, each rank runs one chunk after
    the other.
    """
    ranks, chunks = len(plan.ranks), plan.pipelining.chunks
    if chunks > 1 and microbatches < ranks:
        return _chunk_by_chunk(ranks, microbatches, chunks)
    return schedule_of(plan, microbatches)


def one_at_a_time(rank_of_stage: Sequence[int], microbatches: int) -> Schedule:
    """Return a schedule that takes each micro-batch through all stages and back before the next one."""
    actions: list[list[Action]] = [[] for _ in range(max(rank_of_stage) + 1)]
    for i in range(microbatches):
        for stage, rank in enumerate(rank_of_stage):
            actions[rank].append(Action("F", i, stage))
        for stage, rank in reversed(list(enumerate(rank_of_stage))):
            actions[rank].append(Action("B", i, stage))
    return Schedule("one by one", len(rank_of_stage), microbatches, tuple(map(tuple, actions)))


def _chunk_by_chunk(ranks: int, microbatches: int, chunks: int) -> Schedule:
    actions = [
        [Action("F", i, chunk * ranks + rank) for chunk in range(chunks) for i in range(microbatches)]
        + [
            Action("B", i, chunk * ranks + rank)
            for chunk in reversed(range(chunks))
            for i in range(microbatches)
        ]
        for rank in range(ranks)
    ]
    return Schedule("interleaved", ranks * chunks, microbatches, tuple(map(tuple, actions)))
