"""The schedule of a plan: what training runs and what the forecast simulates."""

from __future__ import annotations

from collections.abc import Sequence

from hvpipe.errors import PlanError
from hvpipe.plan.stage_plan import DATA_PARALLEL, Plan
from hvpipe.schedule.action import Action
from hvpipe.schedule.schedule import Schedule, make


def schedule_of(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Return the schedule of a plan. Its rank k is the device `plan.ranks[k]`.

    Args:
        plan: A pipeline.
        microbatches: The number of micro-batches; the plan's own number by default.

    Returns:
        The schedule.

    Raises:
        PlanError: The plan is not a pipeline.
    """
    check_is_pipeline(plan)
    how = plan.pipelining
    count = how.microbatches if microbatches is None else microbatches
    if how.chunks > 1:
        return make(how.schedule, len(plan.ranks), count, how.chunks)
    counts = [len(stage.devices) for stage in plan.stages]
    return make(how.schedule, counts, count, shares=[stage.shares for stage in plan.stages])


def check_is_pipeline(plan: Plan) -> None:
    """Raise PlanError for a plan without a schedule: data parallel, or stages that are not contiguous."""
    if plan.method == DATA_PARALLEL:
        raise PlanError(
            "Only a pipeline has a schedule. A data-parallel plan is for hvpipe.keras.data_parallel, with a "
            "batch of its share for each rank; or plan again with mode pipeline or hybrid. "
            f"Received: method={plan.method!r}, shares={list(plan.stages[0].shares)}"
        )
    if not plan.contiguous:
        raise PlanError(f"Only a pipeline has a schedule. Received: method={plan.method!r}")


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
