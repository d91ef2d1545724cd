"""Writes a run's outputs when its session closes: trace file, utilization file, summary."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvpipe.atomic_file import atomic_file
from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Clock, Trace
from hvpipe.trace.run_report import Summary, summarise
from hvpipe.trace.sample import Sample
from hvpipe.trace.timeline import events_of_rank

if TYPE_CHECKING:
    from hvpipe.session import Session


@dataclass(frozen=True)
class _RankRun:
    """The records of one rank, on rank 0's clock."""

    trace: Trace
    counters: dict[str, float]
    step_durations_s: Sequence[float]
    samples: float
    utilization: dict[str, Any]
    device_samples: list[dict[str, Any]]
    notes: list[str]


def report_run(session: Session) -> Summary | None:
    """Gather all ranks' records on rank 0, which writes the files and prints the summary. Collective."""
    settings = session.settings
    runs: list[_RankRun] | None = session.engine.gather_object(_recorded(session), "the summary of the run")
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
            "trained_with": session.trained_with,
            "utilization": [run.utilization for run in runs],
            "utilization_notes": _unique_notes(runs),
        }
        with _warned_of_errors("trace"):
            Trace(whole.events, metadata).write(settings.trace_path)
            _warn_of_dropped_events(runs)
    if settings.utilization_path:
        with _warned_of_errors("utilization"), atomic_file(settings.utilization_path) as file:
            file.write(_utilization(Path(settings.utilization_path), runs).encode())
    # A note about missing GPUs matters only if the run has GPUs, or the user asked for utilization.
    if settings.utilization_path or any(run.utilization["gpu"] for run in runs):
        for note in _unique_notes(runs):
            print(f"hvpipe: utilization: {note}", file=sys.stderr, flush=True)
    if settings.summary and summary.steps > 0:
        print(summary.to_line(), file=sys.stderr, flush=True)
    return summary


def _recorded(session: Session) -> _RankRun:
    """Return this rank's records, without those that no file needs: samples may be many. Collective."""
    assert session.sampler is not None
    settings, sampler = session.settings, session.sampler
    traced, listed = bool(settings.trace_path), bool(settings.utilization_path)
    # Clocks drift apart over hours, so files need a second reading.
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


@contextlib.contextmanager
def _warned_of_errors(what: str) -> Iterator[None]:
    """Say that a file could not be written, and go on: the training is done, and must not count as failed."""
    try:
        yield
    except (OSError, HvpipeError) as error:
        print(f"hvpipe: the {what} is not written: {error}", file=sys.stderr, flush=True)


def _warn_of_dropped_events(runs: list[_RankRun]) -> None:
    """Warn if the trace ends before the run. The counters in its metadata have the numbers of lost events."""
    dropped = [run.counters.get("events_dropped", 0) for run in runs]
    if any(dropped):
        print(
            f"hvpipe: trace: {sum(map(bool, dropped))} of {len(runs)} ranks ran out of room and lost their "
            f"last {sum(dropped):,.0f} events; trace a shorter run",
            file=sys.stderr,
            flush=True,
        )


def _rows(samples: Iterable[Sample], clock: Clock) -> list[dict[str, Any]]:
    """Return the rows of the utilization file, in rank 0's time like the trace."""
    return [replace(sample, time_s=clock.of_rank_0(sample.time_s)).to_row() for sample in samples]


def _unique_notes(runs: list[_RankRun]) -> list[str]:
    """Return each note about a missing measurement, with the number of ranks that have it."""
    ranks = Counter(note for run in runs for note in dict.fromkeys(run.notes))
    return [f"{note} ({count} of {len(runs)} ranks)" for note, count in ranks.items()]


def _utilization(path: Path, runs: list[_RankRun]) -> str:
    """Return one CSV row per sample, or one JSON list per rank if the name ends in .json."""
    if path.suffix == ".json":
        return json.dumps([run.device_samples for run in runs]) + "\n"
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
    return "\n".join(lines) + "\n"
