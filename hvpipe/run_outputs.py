"""What a run leaves behind when its session closes: the trace file, the utilization file, the summary."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvpipe.trace.events import Clock, Trace
from hvpipe.trace.run_report import Summary, summarise
from hvpipe.trace.sample import Sample
from hvpipe.trace.timeline import events_of_rank

if TYPE_CHECKING:
    from hvpipe.session import Session


@dataclass(frozen=True)
class _RankRun:
    """What one rank recorded, on rank 0's clock."""

    trace: Trace
    counters: dict[str, float]
    step_durations_s: list[float]
    samples: float
    utilization: dict[str, Any]
    device_samples: list[dict[str, Any]]
    notes: list[str]


def report_run(session: Session) -> Summary | None:
    """Gather on rank 0 what all ranks recorded; it writes the files and prints the summary. Collective."""
    settings = session.settings
    runs: list[_RankRun] | None = session.engine.gather_object(_recorded(session))
    if runs is None:
        return None
    whole = Trace.merge(run.trace for run in runs)
    summary = summarise(
        whole if settings.trace_path else None,
        [run.counters for run in runs],
        [run.step_durations_s for run in runs],
        round(sum(run.samples for run in runs)),
        [run.utilization for run in runs],
    )
    if settings.trace_path:
        metadata = {
            "counters": [run.counters for run in runs],
            "summary": summary.to_json(),
            "utilization": [run.utilization for run in runs],
            "utilization_notes": _said_once(runs),
        }
        Trace(whole.events, metadata).write(settings.trace_path)
        _tell_dropped(runs)
    if settings.utilization_path:
        _write_utilization(Path(settings.utilization_path), runs)
    # That there is no GPU is news only to those who asked.
    if settings.utilization_path or any(run.utilization["gpu"] for run in runs):
        for note in _said_once(runs):
            print(f"hvpipe: utilization: {note}", file=sys.stderr, flush=True)
    if settings.summary and summary.steps > 0:
        print(summary.to_line(), file=sys.stderr, flush=True)
    return summary


def _recorded(session: Session) -> _RankRun:
    """Only what will be written: all samples of a long run as events are many. Collective."""
    assert session.sampler is not None
    settings, sampler = session.settings, session.sampler
    traced, listed = bool(settings.trace_path), bool(settings.utilization_path)
    # Over hours clocks run apart.
    clock = Clock(session.clock_reading, session.read_clock() if traced or listed else session.clock_reading)
    trace = Trace()
    if traced:
        recorded = events_of_rank(session.engine.take_events(), session.world.rank)
        trace = Trace((*recorded, *sampler.events())).retime(clock.of_rank_0)
    return _RankRun(
        trace=trace,
        counters=session.engine.counters(),
        step_durations_s=session.step_durations_s,
        samples=sum(counter.total() for counter in session.sample_counters),
        utilization=sampler.summary().to_json(),
        device_samples=_rows(sampler.samples(), clock) if listed else [],
        notes=sampler.notes(),
    )


def _tell_dropped(runs: list[_RankRun]) -> None:
    """A trace that ends before the run does says so; its metadata has the numbers among the counters."""
    dropped = [run.counters.get("events_dropped", 0) for run in runs]
    if any(dropped):
        print(
            f"hvpipe: trace: it lacks the last {sum(dropped):,.0f} events of {sum(map(bool, dropped))} of "
            f"{len(runs)} ranks, which had no room for more: trace a shorter run",
            file=sys.stderr,
            flush=True,
        )


def _rows(samples: Iterable[Sample], clock: Clock) -> list[dict[str, Any]]:
    """Rows of the utilization file, at rank 0's times, as in the trace."""
    return [replace(sample, time_s=clock.of_rank_0(sample.time_s)).to_row() for sample in samples]


def _said_once(runs: list[_RankRun]) -> list[str]:
    """What the ranks could not measure and why; what several say, with how many do."""
    ranks = Counter(note for run in runs for note in dict.fromkeys(run.notes))
    return [f"{note} ({count} of {len(runs)} ranks)" for note, count in ranks.items()]


def _write_utilization(path: Path, runs: list[_RankRun]) -> None:
    """One row a sample (CSV), or one JSON list per rank where the name ends in .json."""
    if path.suffix == ".json":
        path.write_text(json.dumps([run.device_samples for run in runs]) + "\n")
        return
    columns = [
        key
        for key in dict.fromkeys(key for run in runs for row in run.device_samples for key in row)
        if any(row[key] is not None for run in runs for row in run.device_samples)
    ]
    lines = [",".join(["rank", *columns])]
    for rank, run in enumerate(runs):
        for row in run.device_samples:
            values = ("" if row.get(key) is None else str(row[key]) for key in columns)
            lines.append(",".join([str(rank), *values]))
    path.write_text("\n".join(lines) + "\n")
