"""Advice from traces written by hand: the parts of a step, and what changes would bring."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from hvpipe.errors import HvpipeError
from hvpipe.trace.advice import StepParts, changes, describe, step_parts
from hvpipe.trace.events import Event, Trace


def events(rank: int, *spans: tuple[str, float, float]) -> list[Event]:
    """Return events of these kinds, from and to; there is one bucket."""
    names = {"wait": "bucket", "reduce": "bucket"}
    return [
        Event(names.get(kind, kind), kind, rank, "compute", start_s, end_s) for kind, start_s, end_s in spans
    ]


def step(rank: int, start_s: float, forward_s: float) -> list[Event]:
    """Return a step of 10 s: a forward, a backward of 3 s and a reduce from its last second to 8 s.

    The bucket is ready a second after the backward. An update of 1 s follows.
    """
    backward_s, done_s = start_s + forward_s + 3, start_s + 8
    return events(
        rank,
        ("step", start_s, start_s + 10),
        ("forward", start_s, start_s + forward_s),
        ("backward", start_s + forward_s, backward_s),
        ("wait", backward_s, backward_s + 1),
        ("reduce", backward_s + 1, done_s),
        ("update", done_s, done_s + 1),
    )


def made(parts: Iterable[list[Event]], **trained_with: Any) -> Trace:
    return Trace(tuple(event for each in parts for event in each), {"trained_with": trained_with})


def trace(steps: int = 6, **trained_with: Any) -> Trace:
    """Return a run of two ranks. The forward of rank 1 takes a second longer."""
    return made((step(rank, 10.0 * n, 2.0 + rank) for n in range(steps) for rank in range(2)), **trained_with)


def parts_of(trace: Trace) -> StepParts:
    found = step_parts(trace)
    assert isinstance(found, StepParts), found
    return found


def test_the_parts_of_a_step_add_up() -> None:
    found = parts_of(trace())
    # Rank 1: forward 3, backward 3, wait 6 to 7, reduce 7 to 8, update to 9, nothing to 10.
    # Rank 0 computes a second less.
    assert found == StepParts(
        1, 6, 1, 1, 1, 1, forward_s=3, reducing_s=1, busy_s=0, late_s=0.5, ranks=2, reduces=1
    )
    assert found.step_s == 10


def test_the_rank_that_holds_up_the_others_may_wait_for_its_input() -> None:
    slow = [step(0, 10.0 * n, 2.0) for n in range(6)]
    fast = [[*step(1, 10.0 * n, 2.5), *events(1, ("wait", 10 * n + 9, 10 * n + 10))] for n in range(6)]
    found = parts_of(made([*slow, *fast]))
    assert (found.rank, found.rest_s, found.late_s) == (0, 1, 0.25)


def test_pauses_are_no_part_of_a_step_and_waits_for_the_link_are() -> None:
    """An evaluation follows one step. In another training one step waits long for the link."""
    paused = [step(0, 10.0 * n + (100 if n > 4 else 0), 2.0) for n in range(9)]
    paused[4][0] = replace(paused[4][0], end_s=150.0)
    assert parts_of(made(paused)).step_s == 10
    waiting = [step(0, 10.0 * n, 2.0) for n in range(9)]
    waiting[6] = events(
        0, ("step", 60, 100), ("forward", 60, 62), ("wait", 62, 62), ("reduce", 62, 99), ("update", 99, 100)
    )
    for place in (7, 8):
        waiting[place] = step(0, 10.0 * place + 30, 2.0)
    assert parts_of(made(waiting)).link_s == pytest.approx((5 * 2 + 37) / 6)


def test_steps_that_warm_up_do_not_count() -> None:
    few = "the trace needs at least 6 steps, of which the first 2 warm up"
    assert step_parts(trace(steps=5)) == few  # the last one may be cut
    assert "needs at least 10 steps" in str(step_parts(trace(steps=9, warmup_steps=4)))
    assert isinstance(step_parts(trace(steps=10, warmup_steps=4)), StepParts)


def test_other_traces_have_no_parts() -> None:
    def without(category: str) -> Trace:
        return Trace(tuple(e for e in trace().events if e.category != category))

    assert step_parts(Trace()) == "the trace is empty"
    assert step_parts(without("reduce")) == "nothing was reduced over ranks"
    assert "as on GPUs" in str(step_parts(without("forward")))
    sends = Trace((*trace().events, Event("send", "transfer", 0, "transfer", 1.0, 2.0)))
    assert step_parts(sends) == "the trace is a pipeline's"
    accumulated = [event for event in trace().events if event.category != "backward" or event.start_s < 10]
    assert "accumulated gradients" in str(step_parts(Trace(tuple(accumulated))))
    for overlap in ("local", "stale"):
        assert f'with overlap="{overlap}"' in str(step_parts(trace(overlap=overlap)))


def test_what_is_reduced_before_the_last_rank_has_it_is_waiting() -> None:
    """Rank 0 has its bucket a second before rank 1, and its reduce begins at once."""
    spans = [
        span
        for n in range(6)
        for rank, sum_s in enumerate((7.5, 9))
        for span in events(
            rank,
            ("step", 10 * n, 10 * n + 10),
            ("forward", 10 * n, 10 * n + 3),
            ("backward", 10 * n + 3, 10 * n + 5 + rank),
            ("wait", 10 * n + 5 + rank, 10 * n + 5 + rank),
            ("reduce", 10 * n + 5 + rank, 10 * n + sum_s),
            ("update", 10 * n + sum_s, 10 * n + 10),
        )
    ]
    found = parts_of(Trace(tuple(spans)))
    assert (found.rank, found.link_s, found.waiting_s, found.update_s) == (0, 1.5, 1, 2.5)
    assert (found.reducing_s, found.late_s) == (1.5, 0.25)


@pytest.mark.parametrize(
    "trained_with", [None, [], "step", {"overlap": [], "compression": {}}, {"warmup_steps": "x"}]
)
def test_what_a_trace_says_of_its_training_may_be_anything(trained_with: Any) -> None:
    found = Trace(trace().events, {"trained_with": trained_with})
    parts = parts_of(found)
    assert not any(
        "overlap" in each.what or "compression" in each.what for each in changes(parts, trained_with)
    )


def test_times_that_no_run_has() -> None:
    huge = [
        [replace(e, start_s=e.start_s * 1e307, end_s=e.end_s * 1e307) for e in step(0, n, 2.0)]
        for n in range(6)
    ]
    with pytest.raises(HvpipeError, match="times should be seconds of a run"):
        step_parts(made(huge))


def test_many_steps_take_no_time() -> None:
    many = parts_of(trace(steps=20_000))
    assert many.step_s == pytest.approx(10)


PARTS = StepParts(0, 6.0, 1.0, 2.0, 0.0, 1.0, forward_s=3.0, reducing_s=3.0, busy_s=0.0, late_s=0.0, ranks=4)


def speedups(parts: StepParts = PARTS, **trained_with: Any) -> dict[str, float]:
    return {each.what: each.speedup for each in changes(parts, {"compression": None, **trained_with})}


def test_sending_less_saves_at_most_the_wait_for_the_link() -> None:
    found = speedups(overlap="step")
    assert found['compression="int8"'] == pytest.approx(10 / 8)  # 2.25 s less, of which 2 s were waited for
    assert found['overlap="local", every=8'] == pytest.approx(10 / 8)
    found = speedups(overlap="step", compression="bf16")
    assert found['compression="int8"'] == pytest.approx(10 / 8.5)
    assert 'compression="bf16"' not in found


def test_local_hides_an_average_behind_a_round() -> None:
    assert speedups(overlap="step", compression="int8")['overlap="local", every=8'] == pytest.approx(10 / 8)
    late = replace(PARTS, link_s=72.0, reducing_s=80.0)  # 80 s a round of 8 steps of 8 s: 2 s a step are left
    assert speedups(late, overlap="none")['overlap="local", every=8'] == pytest.approx(80 / 10)
    waits = replace(PARTS, waiting_s=8.0)
    assert speedups(waits, overlap="step")['overlap="local", every=8'] == pytest.approx(18 / 9)


def test_what_does_not_go_together_is_not_advised() -> None:
    assert 'compression="int8"' not in speedups(replace(PARTS, ranks=64), overlap="step")
    assert not any("local" in what for what in speedups(overlap="step", refuses=["local"]))
    assert not any("int8" in what for what in speedups(overlap="step", refuses=["local", "int8"]))
    assert set(speedups()) == {"input and callbacks that take no time"}  # of an unknown training


def test_a_mode_that_hides_more() -> None:
    assert speedups(overlap="none")['overlap="step"'] == pytest.approx(10 / 8)
    assert 'overlap="step"' not in speedups(overlap="step")
    # Of twice the batch, "none" hides nothing more; "step" hides all of the link.
    found = speedups(replace(PARTS, link_s=1.0), overlap="none", compression="int8", refuses=["local"])
    assert found["twice the batch, in samples per second"] == pytest.approx(18 / 15)
    found = speedups(replace(PARTS, reducing_s=2.0), overlap="step")
    assert found["twice the batch, in samples per second"] == pytest.approx(20 / 14)


def test_busy_cores_are_not_freed_by_hiding_more() -> None:
    busy = replace(PARTS, busy_s=9.0)
    found = speedups(busy, overlap="none", compression="int8")
    assert found['overlap="step"'] == pytest.approx(10 / 9)
    assert found['overlap="local", every=8'] == pytest.approx(10 / 8)
    looks = [
        Event("host busy", "utilization", rank, "u", at_s, at_s, {"share": share})
        for rank in range(2)
        for at_s, share in ((21.0, 1.0), (25.0, 0.5), (37.0, 0.9), (200.0, 1.0))
    ]
    sampled = parts_of(Trace((*trace().events, *looks), {}))
    assert sampled.busy_s == pytest.approx(10 * (4 * 0.5 + 12 * 0.9) / 16)


def sampled(host: float, rank: float, communication: float) -> Trace:
    """Return the run with the mean share of busy cores, and the cores of a rank and its communication."""
    looks = [
        Event(name, "utilization", rank_, "u", at_s, at_s, {key: value})
        for name, key, value in (
            ("host busy", "share", host),
            ("cores busy with this rank", "cores", rank),
            ("cores busy with communication", "cores", communication),
        )
        for rank_ in range(2)
        for at_s in (21.0, 37.0)
    ]
    return Trace((*trace().events, *looks), {})


def test_moving_data_beside_computing_slows_it() -> None:
    """In a step of 10 s the rank computes for 7 on its core; 2 core-seconds move data, all while it waits."""
    assert parts_of(sampled(0.9, 0.9, 0.2)).moving_s == pytest.approx(2)
    assert parts_of(sampled(0.9, 1.6, 0.2)).moving_s == pytest.approx(1)  # it computes on two cores
    assert parts_of(sampled(0.6, 0.9, 0.2)).moving_s == 0  # cores are free
    for strange in (float("nan"), float("inf"), -1.0, 0.0):
        assert parts_of(sampled(0.9, strange, 0.2)).moving_s == 0
        assert parts_of(sampled(0.9, 0.9, strange)).moving_s == 0
    # Half of the reduce is beside a longer backward: the rank computes for 8.5 s.
    events_ = sampled(1.0, 0.95, 0.2).events
    longer = [replace(e, end_s=e.end_s + 1.5) if e.category == "backward" else e for e in events_]
    beside = parts_of(Trace(tuple(longer), {}))
    assert (beside.computing_s, beside.link_s) == (7.5, 0.5)
    assert (beside.moving_s, beside.slowed_s) == (pytest.approx(2), pytest.approx(1))
    assert replace(PARTS, moving_s=30.0).slowed_s == 3
    # A third of the reducing is beside computing.
    found = speedups(replace(PARTS, moving_s=3.0, busy_s=9.0), overlap="step", refuses=["int8", "bf16"])
    assert found["twice the batch, in samples per second"] == pytest.approx(20 / 14)
    assert found['overlap="local", every=8'] == pytest.approx(10 / (8 - 1 + 3 / 8))


def test_a_run_that_only_computes() -> None:
    alone = StepParts(
        0, 6.0, 0.0, 0.0, 0.0, 0.0, forward_s=3.0, reducing_s=3.0, busy_s=0.0, late_s=0.0, ranks=2
    )
    assert changes(alone, {"overlap": "step", "compression": None}) == []
    assert describe(alone, []).endswith("no change that hvpipe knows would make it 3 % faster")


def test_small_steps() -> None:
    """Of 10 ms Python takes 1, and latency 1 of the 2 ms of the link, which compression does not shorten."""
    small = replace(PARTS, computing_s=6e-3, update_s=1e-3, link_s=2e-3, rest_s=1e-3, reducing_s=2e-3)
    assert "steps are small" not in describe(small, [])
    small = replace(small, reduces=6.0)
    said = describe(small, changes(small, {"overlap": "step", "compression": None}))
    assert "\nsteps are small, 10.0 ms: larger batches" in said
    assert "share the 22% that do not depend on their size\n" in said
    assert speedups(small, overlap="step", refuses=["local"])['compression="int8"'] == pytest.approx(10 / 9.4)
    assert "steps are small" not in describe(replace(small, computing_s=20e-3), [])


def test_computing_without_onednn_is_named_where_it_counts() -> None:
    assert parts_of(trace(onednn=False)).onednn is False
    assert parts_of(trace(onednn="x")).onednn is None
    without = replace(PARTS, computing_s=20.0, onednn=False)
    assert "TF_ENABLE_ONEDNN_OPTS=1" in describe(without, [])
    others: list[dict[str, Any]] = [{"onednn": True}, {"onednn": None}, {"link_s": 30.0}]
    for other in others:
        assert "oneDNN" not in describe(replace(without, **other), [])


def test_a_late_rank_is_named() -> None:
    late = StepParts(
        1, 6.0, 1.0, 0.0, 0.0, 1.0, forward_s=3.0, reducing_s=3.0, busy_s=0.0, late_s=2.0, ranks=2
    )
    said = describe(late, changes(late, {"overlap": "step", "compression": None}))
    assert said.startswith(
        "a step of rank 1: computing 75%, update 12%, input, callbacks, Python 12%, link 0%, late"
    )
    assert "rank 1 takes longest of all: 25% of a step more than the mean rank" in said
    assert "  smaller batches on rank 1, larger ones elsewhere: 1.33x\n" in said
