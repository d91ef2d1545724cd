"""Draws a foreseen or recorded step as text: a line for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Event, Trace

_COLOURS = {"F": "44;97", "B": "42;30", "I": "46;30", "W": "43;30", "U": "47;30"}
"""Of each kind of action, on a terminal: background and foreground."""


def draw(trace: Trace, columns: int = 100, colours: bool = False) -> str:
    """The ranks' computing as text, a line each, `columns` wide: actions, dots where a rank waits.

    rank 0 | F0 F1 F2 ......... B0--- F3 ...

    Lines have the names of the devices where the trace's metadata know them. With `colours` each kind of
    action has its own (escape codes of terminals).
    """
    events = [event for event in trace.events if event.lane == "compute"]
    if columns < 1 or not events:
        raise HvpipeError(
            "A drawing needs columns and a trace with events in lane 'compute'. "
            f"Received: columns={columns}, {len(events)} events"
        )
    ranks = sorted({event.rank for event in events})
    devices = trace.metadata.get("devices", [])
    names = {rank: str(devices[rank]) if rank < len(devices) else f"rank {rank}" for rank in ranks}
    width = max(map(len, names.values()))
    # Waits and updates are of no single stage.
    of_stages = [event for event in events if event.category in ("forward", "backward")]
    plain = all(event.args.get("stage") == event.rank for event in of_stages)
    lines = []
    for rank in ranks:
        cells = _cells(events, rank, plain, columns)
        line = "".join(_paint(text, kind) if colours else text for text, kind in cells)
        lines.append(f"{names[rank]:<{width}} | {line.rstrip()}")
    return "\n".join(lines) + "\n"


def _cells(events: list[Event], rank: int, plain: bool, columns: int) -> Iterator[tuple[str, str]]:
    """The line of a rank in pieces, each with the kind of its action; none where it waits."""
    start_s = min(event.start_s for event in events)
    per_s = columns / (max(event.end_s for event in events) - start_s or 1.0)
    at = 0
    of_rank = [event for event in events if event.rank == rank and event.category != "wait"]
    for event in sorted(of_rank, key=lambda event: (event.start_s, event.end_s)):
        first, last = (round((time - start_s) * per_s) for time in (event.start_s, event.end_s))
        label = event.name.lstrip("0123456789") if plain else event.name
        yield "." * (first - at), ""
        yield _cell(label, last - first), event.args.get("kind", event.name[:1].upper())
        at = last
    yield "." * (columns - at), ""


def _cell(label: str, width: int) -> str:
    """The label in that width: cut, or filled with dashes and set apart by a space."""
    return label[:width] if width <= len(label) else f"{label:-<{width - 1}} "


def _paint(text: str, kind: str) -> str:
    return f"\033[{_COLOURS[kind]}m{text}\033[0m" if text and kind in _COLOURS else text
