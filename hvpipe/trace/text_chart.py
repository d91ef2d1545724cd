"""Draws a forecast or recorded step as text: a line for each rank."""

from __future__ import annotations

from collections.abc import Iterator

from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Event, Trace

_COLOURS = {"F": "44;97", "B": "42;30", "I": "46;30", "W": "43;30", "U": "47;30"}
"""For each kind of action, its background and foreground colour on a terminal."""


def draw(trace: Trace, columns: int = 100, colours: bool = False) -> str:
    """Draw the computing of every rank as text, with dots where a rank waits.

    rank 0 | F0 F1 F2 ......... B0--- F3 ...

    Args:
        trace: Events in lane "compute". Lines have device names if the trace's metadata have `devices`.
        columns: Characters for the whole step.
        colours: Whether to colour each kind of action, with the escape codes of terminals.

    Returns:
        A line for each rank.

    Raises:
        HvpipeError: If `columns` is below 1, or the trace has no events in lane "compute".

    Example:
        ```python
        print(draw(forecast(plan, profile, cluster).trace))
        ```
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
    # Waits and updates belong to no single stage.
    of_stages = [event for event in events if event.category in ("forward", "backward")]
    plain = all(event.args.get("stage") == event.rank for event in of_stages)
    lines = []
    for rank in ranks:
        cells = _cells(events, rank, plain, columns)
        line = "".join(_paint(text, kind) if colours else text for text, kind in cells)
        lines.append(f"{names[rank]:<{width}} | {line.rstrip()}")
    return "\n".join(lines) + "\n"


def _cells(events: list[Event], rank: int, plain: bool, columns: int) -> Iterator[tuple[str, str]]:
    """Yield the pieces of a rank's line, each with the kind of its action; empty for a wait."""
    start_s = min(event.start_s for event in events)
    per_s = columns / max(max(event.end_s for event in events) - start_s, 1e-300)  # finite
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
    """Fit the label into the width: cut it, or fill it with dashes and a space."""
    return label[:width] if width <= len(label) else f"{label:-<{width - 1}} "


def _paint(text: str, kind: str) -> str:
    return f"\033[{_COLOURS[kind]}m{text}\033[0m" if text and kind in _COLOURS else text
