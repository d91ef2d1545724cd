"""Draws a foreseen or recorded step as text: a line for each rank."""

from __future__ import annotations

from hvpipe.errors import HvpipeError
from hvpipe.trace import Trace


def draw(trace: Trace, columns: int = 100) -> str:
    """The ranks' computing as text, a line each, `columns` wide: actions, dots where a rank waits.

    rank 0 | F0 F1 F2 ......... B0--- F3 ...
    """
    events = [event for event in trace.events if event.lane == "compute"]
    if columns < 1 or not events:
        raise HvpipeError(
            "A drawing needs columns and a trace with events in lane 'compute'. "
            f"Received: columns={columns}, {len(events)} events"
        )
    start_s = min(event.start_s for event in events)
    per_s = columns / (max(event.end_s for event in events) - start_s or 1.0)
    ranks = sorted({event.rank for event in events})
    plain = all(event.args.get("stage") == event.rank for event in events if event.category != "wait")
    lines = []
    for rank in ranks:
        line = "." * columns
        for event in events:
            if event.rank == rank and event.category != "wait":
                first, last = (round((time - start_s) * per_s) for time in (event.start_s, event.end_s))
                label = event.name.lstrip("0123456789") if plain else event.name
                line = line[:first] + _cell(label, last - first) + line[last:]
        lines.append(f"rank {rank:>{len(str(ranks[-1]))}} | {line.rstrip()}")
    return "\n".join(lines) + "\n"


def _cell(label: str, width: int) -> str:
    """The label in that width: cut, or filled with dashes and set apart by a space."""
    return label[:width] if width <= len(label) else f"{label:-<{width - 1}} "
