"""Events and traces: timelines of all ranks, in the Chrome JSON format that Perfetto opens."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

from hvpipe.atomic_file import atomic_file
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import open_plain, read_at_most

CATEGORIES = (
    "step",
    "forward",
    "backward",
    "transfer",
    "pack",
    "wait",
    "reduce",
    "unpack",
    "update",
    "utilization",
)
"""The categories that hvpipe records or forecasts. "utilization" events are samples, drawn as curves."""

_US = 1e6
_MOST_BYTES = 1 << 30  # of a file, also of one that is packed into less


@dataclass(frozen=True)
class Event:
    """A span of time on one rank, or a sample.

    Args:
        name: The event's name, such as "2F0".
        category: One of `CATEGORIES`, or any other text.
        rank: The rank.
        lane: The row to draw it in: "compute", "transfer", ...
        start_s: Start in seconds.
        end_s: End in seconds, at or after the start. A sample starts and ends at the same time.
        args: JSON values. In category "utilization", the sampled numbers.

    Raises:
        HvpipeError: If a time is not finite, or the end is before the start.
    """

    name: str
    category: str
    rank: int
    lane: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_s) and math.isfinite(self.end_s) and self.start_s <= self.end_s):
            raise HvpipeError(
                f"Event {self.name!r} should end at or after its start, both finite. "
                f"Received: start_s={self.start_s}, end_s={self.end_s}"
            )

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Clock:
    """Converts this rank's time to rank 0's, from two readings; between them, the clocks drift evenly.

    A reading is a time of this rank's clock, and the seconds that rank 0's clock was ahead at that time.
    """

    first: tuple[float, float]
    last: tuple[float, float]

    def of_rank_0(self, time_s: float) -> float:
        """Return rank 0's time when this rank's clock said `time_s`."""
        (begin_s, ahead_s), (end_s, ahead_at_end_s) = self.first, self.last
        passed = (time_s - begin_s) / (end_s - begin_s) if end_s > begin_s else 0.0
        return time_s + ahead_s + passed * (ahead_at_end_s - ahead_s)


@dataclass(frozen=True)
class Trace:
    """A timeline of one or more ranks.

    Args:
        events: The events.
        metadata: JSON values about the run as a whole.

    Example:
        ```python
        forecast(plan, profile, cluster).trace.write("trace.json")  # open it in ui.perfetto.dev
        ```
    """

    events: tuple[Event, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """Merge traces, their events sorted by time; of metadata with equal keys, the first trace's wins."""
        events: list[Event] = []
        metadata: dict[str, Any] = {}
        for trace in traces:
            events.extend(trace.events)
            metadata = {**trace.metadata, **metadata}
        return Trace(tuple(sorted(events, key=lambda event: (event.start_s, event.rank))), metadata)

    def retime(self, clock: Callable[[float], float]) -> Trace:
        """Return the same events with their times converted by `clock`."""
        moved = (replace(e, start_s=clock(e.start_s), end_s=clock(e.end_s)) for e in self.events)
        return Trace(tuple(moved), self.metadata)

    def ranks(self) -> list[int]:
        """Return the ranks that have events, sorted."""
        return sorted({rank for _, rank in self._groups})

    def of(self, category: str, rank: int | None = None) -> list[Event]:
        """Return the events of one category, on one rank or on all."""
        if rank is None:
            return [event for event in self.events if event.category == category]
        return list(self._groups.get((category, rank), ()))

    @cached_property
    def _groups(self) -> dict[tuple[str, int], list[Event]]:
        """The events by category and rank. A trace of many ranks is too long to be searched for each."""
        found: dict[tuple[str, int], list[Event]] = defaultdict(list)
        for event in self.events:
            found[event.category, event.rank].append(event)
        return dict(found)

    def to_chrome_json(self) -> dict[str, Any]:
        """Return a JSON object in the Chrome trace event format: a process per rank, a thread per lane."""
        return {
            "displayTimeUnit": "ms",
            "otherData": dict(self.metadata),
            "traceEvents": list(_chrome_events(self.events)),
        }

    @staticmethod
    def from_chrome_json(document: Mapping[str, Any]) -> Trace:
        """Return the trace of a JSON object, to the nanosecond; ignores kinds that hvpipe does not write.

        Raises:
            HvpipeError: If the object is not a trace.
        """
        rows = document.get("traceEvents")
        if not isinstance(rows, list):
            raise HvpipeError(
                "A trace should be a JSON object with a list `traceEvents`. "
                f"Received: traceEvents={type(rows).__name__}"
            )
        if odd := [row for row in rows if not isinstance(row, dict)]:
            raise _bad_row(odd[0])
        metadata = document.get("otherData", {})
        if not isinstance(metadata, dict):
            raise HvpipeError(f"A trace's `otherData` should be an object. Received: {metadata!r}")
        lanes = {
            (str(row.get("pid")), str(row.get("tid"))): _lane_name(row)
            for row in rows
            if row.get("ph") == "M" and row.get("name") == "thread_name"
        }
        events = (_event(row, lanes) for row in rows if row.get("ph") in ("X", "C"))
        return Trace(tuple(events), dict(metadata))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a Chrome JSON file, compressed if the name ends in .gz. HvpipeError if that fails."""
        try:
            with contextlib.ExitStack() as stack:
                file: Any = stack.enter_context(atomic_file(path))
                if Path(path).suffix == ".gz":
                    file = stack.enter_context(gzip.open(file, "wb"))
                for line in self._chrome_lines():
                    file.write(line.encode())
        except OSError as error:
            why = error.strerror or error
            raise HvpipeError(
                f"The trace should go to a file that can be written. Received: {path}: {why}"
            ) from error

    def _chrome_lines(self) -> Iterator[str]:
        yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(dict(self.metadata))},\n'
        yield '"traceEvents": ['
        separator = "\n"
        for row in _chrome_events(self.events):
            yield separator + json.dumps(row)
            separator = ",\n"
        yield "\n]}\n"

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Trace:
        """Read a trace that `write` wrote; raise HvpipeError if the file is not a trace."""
        source = Path(path)
        try:
            with open_plain(source) as plain, _unpacked(plain, source) as file:
                document = json.loads(read_at_most(file, _MOST_BYTES, source))
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise HvpipeError(f"A trace should be a Chrome JSON file. Received: {source}: {error}") from error
        if not isinstance(document, dict):
            raise HvpipeError(
                f"A trace should be a JSON object. Received: {source}: {type(document).__name__}"
            )
        return Trace.from_chrome_json(document)


def _unpacked(file: BinaryIO, source: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.GzipFile(fileobj=file)) if source.suffix == ".gz" else file


def _chrome_events(events: tuple[Event, ...]) -> Iterator[dict[str, Any]]:
    """Yield the names of ranks and lanes, then the events; lanes are numbered in the order of first use."""
    lanes: dict[tuple[int, str], int] = {}
    for event in events:
        lanes.setdefault((event.rank, event.lane), len(lanes))
    for rank in sorted({event.rank for event in events}):
        yield _name("process_name", rank, 0, f"rank {rank}")
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for (rank, lane), tid in lanes.items():
        yield _name("thread_name", rank, tid, lane)
        yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": tid, "args": {"sort_index": tid}}
    for event in events:
        row: dict[str, Any] = {
            "ph": "C" if event.category == "utilization" else "X",
            "name": event.name,
            "cat": event.category,
            "pid": event.rank,
            "tid": lanes[event.rank, event.lane],
            "ts": round(event.start_s * _US, 3),
        }
        if event.category != "utilization":
            row["dur"] = round(event.duration_s * _US, 3)
        if event.args:
            row["args"] = dict(event.args)
        yield row


def _name(kind: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}}


def _lane_name(row: Mapping[str, Any]) -> str:
    names = row.get("args")
    if not isinstance(names, dict):
        raise HvpipeError(f"A trace's thread_name should have `args` with a name. Received: {row!r}")
    return str(names.get("name"))


def _event(row: Mapping[str, Any], lanes: Mapping[tuple[str, str], str]) -> Event:
    try:
        start_s = float(row["ts"]) / _US
        return Event(
            name=str(row["name"]),
            category=str(row.get("cat", "")),
            rank=int(row["pid"]),
            lane=lanes.get((str(row["pid"]), str(row["tid"])), str(row["tid"])),
            start_s=start_s,
            end_s=start_s + float(row.get("dur", 0.0)) / _US,
            args=dict(row.get("args", {})),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _bad_row(row) from error


def _bad_row(row: object) -> HvpipeError:
    return HvpipeError(f"A trace event should have name, pid, tid and ts. Received: {row!r}")
