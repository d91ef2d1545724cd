"""What a run leaves behind, from a session made up for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvpipe.closing import report_run
from hvpipe.sample import Sample, summarise_samples


class FakeEngine:
    """An engine whose only rank is this one."""

    @staticmethod
    def counters() -> dict[str, float]:
        return {}

    @staticmethod
    def allgather_object(mine: Any) -> list[Any]:
        return [mine]


def session(utilization_path: Path, clock_offset_s: float) -> Any:
    samples = (Sample(10.0, 1.0, 0.5, 1), Sample(10.5, 1.0, 0.5, 1))
    sampler = SimpleNamespace(
        events=lambda: (),
        samples=lambda: samples,
        summary=lambda: summarise_samples(samples),
        notes=list,
    )
    settings = SimpleNamespace(trace_path=None, utilization_path=str(utilization_path), summary=False)
    return SimpleNamespace(
        sampler=sampler,
        settings=settings,
        world=SimpleNamespace(rank=0),
        engine=FakeEngine(),
        step_durations_s=[],
        sample_counters=[],
        clock_offset_s=clock_offset_s,
    )


@pytest.mark.parametrize("name", ["util.csv", "util.json"])
def test_utilization_is_at_rank_0s_times(name: str, tmp_path: Path) -> None:
    report_run(session(tmp_path / name, clock_offset_s=1000.0))
    text = (tmp_path / name).read_text()
    if name.endswith(".json"):
        times = [row["time_s"] for row in json.loads(text)[0]]
    else:
        head, *rows = [line.split(",") for line in text.splitlines()]
        times = [float(row[head.index("time_s")]) for row in rows]
    assert times == [1010.0, 1010.5]
