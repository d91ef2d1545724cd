"""Advice from traces written by hand: the parts of a step, and what changes would bring."""

from __future__ import annotations

import pytest

from hvpipe.trace.advice import StepParts, changes, describe, step_parts
from hvpipe.trace.events import Event, Trace


def step(rank: int, start_s: float, forward_s: float, reduce_until_s: float) -> list[Event]:
    """Return a step of 10 s: a forward, a backward of 3 s that ends with a reduce, an update of 1 s."""
    backward_s = start_s + forward_s + 3
    done_s = start_s + reduce_until_s
    spans = [
        ("step", start_s, start_s + 10),
        ("forward", start_s, start_s + forward_s),
        ("backward", start_s + forward_s, backward_s),
        ("reduce", backward_s - 1, done_s),
        ("update", done_s, done_s + 1),
    ]
    return [Event(name, name, rank, "compute", begin_s, end_s) for name, begin_s, end_s in spans]


def trace(steps: int = 6) -> Trace:
    """Return a run of two ranks, of which rank 1 computes a second longer."""
    every = [step(rank, 10.0 * n, 2.0 + rank, 8.0) for n in range(steps) for rank in range(2)]
    return Trace(tuple(event for events in every for event in events))


def test_the_parts_of_a_step_add_up() -> None:
    found = step_parts(trace())
    assert found is not None
    # Rank 1: forward 3, backward 3, reduce 5 to 8 of which 1 is hidden, update 1, and 1 s of nothing.
    assert found.rank == 1
    parts = (found.computing_s, found.update_s, found.exposed_s, found.between_s)
    assert parts == pytest.approx((6, 1, 2, 1))
    assert (found.forward_s, found.reducing_s, found.late_s) == pytest.approx((3, 3, 0.5))
    assert found.step_s == pytest.approx(10)


def test_other_traces_have_no_parts() -> None:
    assert step_parts(Trace()) is None
    assert step_parts(trace(steps=3)) is None  # the first two warm up, and the last one may be cut
    pipeline = Trace(tuple(e for e in trace().events if e.category != "reduce"))
    assert step_parts(pipeline) is None


PARTS = StepParts(0, 6.0, 1.0, 2.0, 1.0, forward_s=3.0, reducing_s=3.0, late_s=0.0)


def speedups(trained_with: dict[str, object], parts: StepParts = PARTS) -> dict[str, float]:
    return {change.what: change.speedup for change in changes(parts, trained_with)}


def test_sending_less_saves_what_is_exposed_at_most() -> None:
    found = speedups({"overlap": "step", "compression": None})
    assert found['compression="int8"'] == pytest.approx(10 / 8)  # 2.25 s less of a reduce, 2 s of it exposed
    assert found['overlap="local", every=8'] == pytest.approx(10 / 8)
    found = speedups({"overlap": "step", "compression": "bf16"})
    assert found['compression="int8"'] == pytest.approx(10 / 8.5)
    assert 'compression="bf16"' not in found


def test_a_mode_that_hides_more() -> None:
    assert speedups({"overlap": "none", "compression": None})['overlap="step"'] == pytest.approx(10 / 8)
    assert 'overlap="step"' not in speedups({"overlap": "step", "compression": None})


def test_an_unknown_run_and_one_that_only_computes() -> None:
    assert not any("overlap" in what or "compression" in what for what in speedups({}))
    alone = StepParts(0, 6.0, 0.0, 0.0, 0.0, forward_s=3.0, reducing_s=3.0, late_s=0.0)
    assert speedups({"overlap": "step", "compression": None}, alone) == {}
    assert describe(alone, []).endswith("no change that hvpipe knows would make it 3 % faster")


def test_a_late_rank_is_named() -> None:
    late = StepParts(1, 6.0, 1.0, 0.0, 1.0, forward_s=3.0, reducing_s=3.0, late_s=2.0)
    said = describe(late, changes(late, {"overlap": "step", "compression": None}))
    assert "a step of rank 1, which computes longest: computing 75%, update 12%, link 0%" in said
    assert "  smaller batches on rank 1, larger ones elsewhere: 1.33x\n" in said
