"""Draws a foreseen or recorded step as a picture; the only file that imports matplotlib."""

from __future__ import annotations

import os

from hvpipe.errors import HvpipeError
from hvpipe.trace import Event, Trace

# Of each kind of event: its colour, and its name in the legend.
_KINDS = {
    "F": ("#4878a8", "forward"),
    "B": ("#6aa56a", "backward"),
    "I": ("#6fb7b7", "backward for inputs"),
    "W": ("#d9b45b", "backward for weights"),
    "transfer": ("#9b8bb4", "transfer"),
    "reduce": ("#c06c5b", "all-reduce"),
}
# A label is drawn where an action is at least this share of the step.
_ROOM = 0.012


def draw_timeline(trace: Trace, path: str | os.PathLike[str], title: str) -> None:
    """Write a PNG: a row for each rank, its computing above and what it sends below.

    Rows have the names of the devices where the trace's metadata know them. HvpipeError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise HvpipeError(
            "A PNG needs matplotlib: pip install 'hvpipe[plot]'. Received: it is not installed"
        ) from error
    events = [event for event in trace.events if event.category != "wait" and event.end_s > event.start_s]
    ranks = sorted({event.rank for event in events})
    if not events:
        raise HvpipeError("A picture needs a trace with events. Received: none")
    devices = trace.metadata.get("devices", [])
    end_s = max(event.end_s for event in events)
    figure = Figure(figsize=(12, 1.4 + 0.62 * len(ranks)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for event in events:
        row = ranks.index(event.rank)
        computes = event.lane == "compute"
        low, height = (row - 0.36, 0.5) if computes else (row + 0.16, 0.18)
        axes.broken_barh(
            [(event.start_s, event.duration_s)],
            (low, height),
            facecolor=_KINDS[_kind(event)][0],
            edgecolor="white",
            linewidth=0.4,
        )
        if computes and event.duration_s > _ROOM * end_s:
            label = str(event.args.get("microbatch", event.name))
            middle_s = event.start_s + event.duration_s / 2
            axes.text(middle_s, low + height / 2, label, ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(ranks)), [_row_name(rank, devices) for rank in ranks])
    axes.set_ylim(len(ranks) - 0.45, -0.55)
    axes.set_xlim(0, end_s)
    axes.set_xlabel("seconds")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    seen = {_kind(event) for event in events}
    patches = [Patch(color=colour, label=name) for kind, (colour, name) in _KINDS.items() if kind in seen]
    figure.legend(handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise HvpipeError(f"The PNG should go to a file that can be written. Received: {error}") from error


def _kind(event: Event) -> str:
    if event.lane == "compute":
        return str(event.args.get("kind", "F" if event.category == "forward" else "B"))
    return event.category


def _row_name(rank: int, devices: list[str]) -> str:
    return str(devices[rank]) if rank < len(devices) else f"rank {rank}"
