"""The schedules that training runs: without pipelining, and for batches with few samples."""

from __future__ import annotations

from itertools import pairwise

from hvpipe.plan.greedy import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.schedule.plan_schedule import schedule_of
from hvpipe.schedule.training_schedule import one_at_a_time, training_schedule
from hvpipe.schedule.verify import verify
from hvpipe.specs.cluster import equal_cluster
from hvpipe.specs.layer_cost import LayerCost
from hvpipe.specs.profile import Profile

NAMES = "abcd"
PROFILE = Profile.of([LayerCost(name, 1, 2) for name in NAMES], list(pairwise(NAMES)))


def test_without_pipelining_micro_batches_run_one_at_a_time() -> None:
    schedule = one_at_a_time((0, 1, 0), 2)
    assert schedule.to_text().splitlines()[1:] == [
        "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1",
        "1F0 1B0 1F1 1B1",
    ]
    verify(schedule)


def test_an_interleaved_batch_with_fewer_micro_batches_than_ranks() -> None:
    """Two ranks with two chunks each: each rank runs one chunk after the other."""
    plan = partition(PROFILE, equal_cluster(2), 4, Pipelining("interleaved", 4, False, 2))
    schedule = training_schedule(plan, 1)
    assert schedule.to_text().splitlines()[1:] == ["0F0 2F0 2B0 0B0", "1F0 3F0 3B0 1B0"]
    verify(schedule)
    assert training_schedule(plan, 4) == schedule_of(plan)
