"""The schedule of a plan: each rank's actions in order."""

from __future__ import annotations

from hvpipe.errors import PlanError
from hvpipe.plan.stage_plan import DATA_PARALLEL, Plan
from hvpipe.schedule.schedule import Schedule, make_schedule


def schedule_of(plan: Plan, microbatches: int | None = None) -> Schedule:
    """Return the schedule that a pipeline's plan was made for.

    Args:
        plan: A plan of a pipeline. The schedule's ranks are `plan.ranks`.
        microbatches: Micro-batches of a step; None for the plan's number.

    Returns:
        The schedule.

    Raises:
        PlanError: If the plan is not a pipeline: data parallel, or layers placed anywhere.

    Example:
        ```python
        schedule_of(plan).write("schedule.json")
        ```
    """
    check_is_pipeline(plan)
    how = plan.pipelining
    count = how.microbatches if microbatches is None else microbatches
    if how.chunks > 1:
        return make_schedule(how.schedule, len(plan.ranks), count, how.chunks)
    counts = [len(stage.devices) for stage in plan.stages]
    return make_schedule(how.schedule, counts, count, shares=[stage.shares for stage in plan.stages])


def check_is_pipeline(plan: Plan) -> None:
    """Refuse a plan without a schedule: data parallel, or layers placed anywhere."""
    if plan.method == DATA_PARALLEL:
        raise PlanError(
            "Only a pipeline has a schedule. Use a data-parallel plan with hvpipe.keras.data_parallel and "
            "give each rank batches of its share, or plan again with mode pipeline or hybrid. "
            f"Received: method={plan.method!r}, shares={list(plan.stages[0].shares)}"
        )
    if not plan.contiguous:
        raise PlanError(f"Only a pipeline has a schedule. Received: method={plan.method!r}")
