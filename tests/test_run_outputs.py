"""The files and messages that a run leaves behind, from a made-up session."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvpipe.run_outputs import report_run
from hvpipe.trace.events import Trace
from hvpipe.trace.sample import Sample, sample_events, summarise_samples


class FakeEngine:
    """An engine of a single rank."""

    def __init__(self, events_dropped: int) -> None:
        self.events_dropped = events_dropped
        self.gathered: Any = None

    def counters(self) -> dict[str, float]:
        return {"events_dropped": self.events_dropped}

    @staticmethod
    def take_events() -> list[tuple[str, str, float, float]]:
        return [("pack", "b", 10.25, 10.5)]

    def gather_object(self, mine: Any, what: str) -> list[Any]:
        self.gathered = mine
        return [mine]


def session(
    *,
    utilization: Path | None = None,
    trace: Path | None = None,
    ahead_s: tuple[float, float] = (0.0, 0.0),
    events_dropped: int = 0,
) -> Any:
    """Return a session that runs from 10 s to 11 s.

    Rank 0's clock is `ahead_s` ahead at its begin and its end.
    """
    samples = (Sample(10.0, 1.0, 0.5, 1), Sample(10.5, 1.0, 0.5, 1))
    sampler = SimpleNamespace(
        events=lambda: [event for sample in samples for event in sample_events(sample, 0)],
        samples=lambda: samples,
        summary=lambda: summarise_samples(samples),
        notes=list,
    )
    return SimpleNamespace(
        sampler=sampler,
        settings=SimpleNamespace(
            trace_path=str(trace) if trace else None,
            utilization_path=str(utilization) if utilization else None,
            summary=False,
        ),
        world=SimpleNamespace(rank=0),
        engine=FakeEngine(events_dropped),
        step_durations_s=[],
        sample_counters=[],
        trained_with={"overlap": "step", "compression": None},
        clock_reading=(10.0, ahead_s[0]),
        read_clock=lambda: (11.0, ahead_s[1]),
    )


@pytest.mark.parametrize("name", ["util.csv", "util.json"])
def test_utilization_is_at_rank_0s_times(name: str, tmp_path: Path) -> None:
    report_run(session(utilization=tmp_path / name, ahead_s=(1000.0, 1002.0)))
    text = (tmp_path / name).read_text()
    if name.endswith(".json"):
        times = [row["time_s"] for row in json.loads(text)[0]]
    else:
        head, *rows = [line.split(",") for line in text.splitlines()]
        times = [float(row[head.index("time_s")]) for row in rows]
    assert times == [1010.0, 1011.5]


def test_a_trace_is_at_rank_0s_times(tmp_path: Path) -> None:
    report_run(session(trace=tmp_path / "t.json", ahead_s=(1000.0, 1002.0)))
    trace = Trace.read(tmp_path / "t.json")
    (pack,) = trace.of("pack")
    assert (pack.start_s, pack.end_s) == pytest.approx((1010.75, 1011.5))
    assert sorted({e.start_s for e in trace.of("utilization")}) == pytest.approx([1010.0, 1011.5])


@pytest.mark.parametrize("listed", [False, True])
def test_without_a_trace_no_events_are_sent(listed: bool, tmp_path: Path) -> None:
    """On many GPUs, the events of a long run take gigabytes."""
    made = session(utilization=tmp_path / "util.csv" if listed else None)
    summary = report_run(made)
    assert made.engine.gathered.trace == Trace()
    assert len(made.engine.gathered.device_samples) == (2 if listed else 0)
    assert summary is not None
    assert (summary.system_share, summary.process_cores) == (0.5, 1.0)


@pytest.mark.parametrize("dropped", [0, 1234])
def test_a_trace_that_lacks_events_says_so(
    dropped: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_run(session(trace=tmp_path / "t.json", events_dropped=dropped))
    assert ("1 of 1 ranks ran out of room and lost their last 1,234 events" in capsys.readouterr().err) is (
        dropped > 0
    )
    assert Trace.read(tmp_path / "t.json").metadata["counters"][0]["events_dropped"] == dropped


def test_a_note_of_several_ranks_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = session(utilization=tmp_path / "util.csv")
    made.sampler.notes = lambda: ["no GPU figures: no driver", "no GPU figures: no driver"]
    made.engine.gather_object = lambda mine, what: [
        mine,
        replace(mine, notes=["no GPU figures: no driver", "more"]),
    ]
    report_run(made)
    assert capsys.readouterr().err.splitlines() == [
        "hvpipe: utilization: no GPU figures: no driver (2 of 2 ranks)",
        "hvpipe: utilization: more (1 of 2 ranks)",
    ]


def test_files_that_cannot_be_written_do_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    assert report_run(session(trace=gone / "t.json", utilization=gone / "util.csv")) is not None
    told = capsys.readouterr().err
    assert "hvpipe: the trace is not written: " in told
    assert "hvpipe: the utilization is not written: " in told
