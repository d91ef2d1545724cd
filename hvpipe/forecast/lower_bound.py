"""A lower bound on the step of a schedule, to judge simulated steps by."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hvpipe.forecast.simulate import Costs, CostTable, cost_table
from hvpipe.schedule.program import Dataflow, checked_dataflow
from hvpipe.schedule.schedule import Schedule


def lower_bound_s(schedule: Schedule, costs: Costs, dataflow: Dataflow | None = None) -> float:
    """Return a lower bound: the seconds that no order of the same actions on the same ranks can beat.

    It is the largest head + computing + tail of all ranks. The head is the time until the first output
    reaches the rank. The tail is the time after its last gradient leaves, until the step ends. Its W's may
    run during the tail:

    rank 0 | F .................... I W |      head 2 F, computing 3 (F + I), tail 2 I + W
    rank 1 | .. F .............. I W    |
    rank 2 | .... F I F I F I W W W     |

    Transfers count in head and tail, but not their queueing. In other ranks' heads and tails, a stage counts
    with its fastest replica.

    Args:
        schedule: The schedule.
        costs: For each stage its times, or a sequence of times with one for each of its ranks.
        dataflow: Which stages use which stages' outputs; None for a chain.

    Returns:
        Seconds.

    Raises:
        HvpipeError: If `costs` do not fit the schedule.

    Example:
        ```python
        schedule = make_schedule("gpipe", ranks=4, microbatches=8)
        costs = [StageTimes(1, 2)] * 4
        simulate(schedule, costs).makespan_s / lower_bound_s(schedule, costs)  # 1.0
        ```
    """
    cost_at = cost_table(schedule, costs)
    dataflow = checked_dataflow(schedule, dataflow)
    head_s, tail_s = _heads(schedule, cost_at, dataflow), _tails(schedule, cost_at, dataflow)
    bound_s = 0.0
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        whole_s = math.fsum(cost_at[action.stage, rank].seconds(action.kind) for action in actions)
        apart_s = math.fsum(cost_at[a.stage, rank].seconds("W") for a in actions if a.kind == "W")
        rest_s = max(whole_s, whole_s - apart_s + min(tail_s[stage] for stage in stages))
        bound_s = max(bound_s, min(head_s[stage] for stage in stages) + rest_s)
    return bound_s


def _heads(schedule: Schedule, cost_at: CostTable, dataflow: Dataflow) -> list[float]:
    """Return the earliest start of each stage's first forward."""
    head_s = [0.0] * schedule.stages
    for source, user in sorted(dataflow.edges):
        transfers = _transfers_s(schedule, cost_at, (source, user), back=False)
        after_s = min(cost_at[source, rank].forward_s + transfer_s for rank, transfer_s in transfers)
        head_s[user] = max(head_s[user], head_s[source] + after_s)
    return head_s


def _tails(schedule: Schedule, cost_at: CostTable, dataflow: Dataflow) -> list[float]:
    """Return the least time from the end of each stage's last B or I to the end of the step."""
    split = {action.stage for actions in schedule.actions for action in actions if action.kind == "W"}
    tail_s = [0.0] * schedule.stages
    for stage in split:
        tail_s[stage] = min(cost_at[stage, rank].seconds("W") for rank in schedule.ranks_of(stage))
    for source, user in sorted(dataflow.edges):
        transfers = _transfers_s(schedule, cost_at, (source, user), back=True)
        kind = "I" if source in split else "B"
        after_s = min(cost_at[source, rank].seconds(kind) + transfer_s for rank, transfer_s in transfers)
        tail_s[user] = max(tail_s[user], after_s + tail_s[source])
    return tail_s


def _transfers_s(
    schedule: Schedule, cost_at: CostTable, edge: tuple[int, int], *, back: bool
) -> Iterator[tuple[int, float]]:
    """Yield (source's rank, transfer seconds) for each pair of a source's rank and a user's rank."""
    source, user = edge
    for rank in schedule.ranks_of(source):
        for replica, away in enumerate(schedule.ranks_of(user)):
            yield rank, 0.0 if rank == away else cost_at[source, rank].travel_s(user, replica, back=back)
