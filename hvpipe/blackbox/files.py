"""Reads the file of a rank's flight recorder, which csrc/base/flight_recorder.h writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.own_folder import read_plain

SUFFIX = ".flight"

_HEADER = struct.Struct("<8s3I3i6dQQQiI64s2048s")
_EVENT = struct.Struct("<QdQI100s")
_MAGIC, _VERSION = b"HVPFLGHT", 1
_EVENTS_AT = 4096
_MOST_EVENTS = _MOST_RANKS = 1_000_000

KINDS: Mapping[int, str] = MappingProxyType(
    {
        1: "ready",
        2: "begun",
        3: "done",
        4: "step",
        5: "packed",
        6: "waits",
        7: "stalled",
        8: "failed",
        9: "note",
    }
)


@dataclass(frozen=True)
class FlightEvent:
    """One event. `at_s` is a Unix time. `sequence` numbers an operation, alike on all ranks, or a step."""

    at_s: float
    kind: str
    what: str
    sequence: int


@dataclass(frozen=True)
class Flight:
    """What one rank left behind. Times are Unix times by the clock of its host.

    Attributes:
        rank: The rank.
        size: How many ranks the job had.
        pid: Its process.
        host: Its host.
        began_s: When it joined.
        heard_s: Its last sign of life, to 0.2 s.
        ended_s: When it ended; None if it could not say so.
        frozen: From when to when its process last did not run, for 2 s or longer.
        why: The error that it ended with; "" for none.
        signal: The signal that ended it; 0 for none that it noticed.
        steps: Training steps that it had begun.
        operations: Communications that had ended.
        events: Its last events, the oldest first.
    """

    rank: int
    size: int
    pid: int
    host: str
    began_s: float
    heard_s: float
    ended_s: float | None
    frozen: tuple[float, float] | None
    why: str
    signal: int
    steps: int
    operations: int
    events: tuple[FlightEvent, ...]


def read_flight(path: Path) -> Flight:
    """Read the file of one rank.

    Raises:
        HvpipeError: It is no such file, or it is cut off.
    """
    try:
        data = read_plain(path, _EVENTS_AT + _MOST_EVENTS * _EVENT.size)
    except OSError as error:
        raise HvpipeError(f"{path} should be a flight recorder's file. Received: {error.strerror}") from error
    if len(data) < _EVENTS_AT or data[: len(_MAGIC)] != _MAGIC:
        raise HvpipeError(f"{path} should be a flight recorder's file. Received: {len(data)} other bytes")
    fields = _HEADER.unpack_from(data)
    version, events, event_bytes, rank, size, pid = fields[1:7]
    unix_s, began_s, heard_s, ended_s, frozen_s, thawed_s = (_finite(value) for value in fields[7:13])
    steps, operations, signal, _, host, why = fields[14:]
    if (version, event_bytes) != (_VERSION, _EVENT.size) or not 0 < events <= _MOST_EVENTS:
        raise HvpipeError(
            f"{path} should have version {_VERSION} of the format. Received: version {version}, "
            f"{events} events of {event_bytes} bytes"
        )
    if not 0 <= rank < size <= _MOST_RANKS:
        raise HvpipeError(f"{path} should be of a rank below the size. Received: rank {rank} of {size}")
    found = [_EVENT.unpack_from(data, at) for at in _places(len(data), events)]
    whole = sorted(event for event in found if event[0] > 0)
    times = [unix_s + _finite(event[1]) for event in whole]
    return Flight(
        rank=rank,
        size=size,
        pid=pid,
        host=_text(host),
        began_s=unix_s + began_s,
        heard_s=max([unix_s + heard_s, *times]),
        ended_s=unix_s + ended_s if ended_s > 0 else None,
        frozen=(unix_s + frozen_s, unix_s + thawed_s) if thawed_s > frozen_s else None,
        why=_text(why),
        signal=signal,
        steps=steps,
        operations=operations,
        events=tuple(
            FlightEvent(at_s, KINDS.get(kind, f"kind {kind}"), _text(what), sequence)
            for at_s, (_, _, sequence, kind, what) in zip(times, whole, strict=True)
        ),
    )


def to_json(flight: Flight) -> dict[str, Any]:
    """Return what a rank left behind as JSON."""
    return {
        **{name: getattr(flight, name) for name in flight.__dataclass_fields__ if name != "events"},
        "events": [[event.at_s, event.kind, event.what, event.sequence] for event in flight.events],
    }


def _places(size_bytes: int, events: int) -> range:
    """Return where whole events begin; a file may be cut off."""
    there = min(events, (size_bytes - _EVENTS_AT) // _EVENT.size)
    return range(_EVENTS_AT, _EVENTS_AT + there * _EVENT.size, _EVENT.size)


def _text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode(errors="replace")
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def _finite(value: float) -> float:
    return value if abs(value) < 1e15 else 0.0  # also for NaN
