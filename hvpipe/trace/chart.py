"""Draws a forecast or recorded step as a PNG; the only file that imports matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.trace.events import Event, Trace

# For each kind of event, its colour and its name in the legend.
_KINDS = {
    "F": ("#4878a8", "forward"),
    "B": ("#6aa56a", "backward"),
    "I": ("#6fb7b7", "backward for inputs"),
    "W": ("#d9b45b", "backward for weights"),
    "U": ("#8c8c8c", "update"),
    "transfer": ("#9b8bb4", "transfer"),
    "reduce": ("#c06c5b", "all-reduce"),
}
# Actions that take at least this share of the step have a label.
_ROOM = 0.012


def draw_timeline(trace: Trace, path: str | os.PathLike[str], title: str) -> None:
    """Draw a timeline as a PNG: a row for each rank, computing above and sends below.

    Args:
        trace: The events. Rows have device names if the trace's metadata have `devices`.
        path: The PNG file.
        title: The title of the picture.

    Raises:
        HvpipeError: If matplotlib is missing, the trace is empty, or the file cannot be written.

    Example:
        ```python
        draw_timeline(forecast(plan, profile, cluster).trace, "step.png", "1F1B")
        ```
    """
    draw_timelines({title: trace}, path)


def draw_timelines(traces: Mapping[str, Trace], path: str | os.PathLike[str]) -> None:
    """Draw several timelines by title, one below the other, with the same time scale."""
    events = {
        title: [event for event in trace.events if event.category != "wait"]
        for title, trace in traces.items()
    }
    if not events or not all(events.values()):
        raise HvpipeError("The trace is empty: there is nothing to draw.")
    rows = [len({event.rank for event in one}) for one in events.values()]
    heights = [0.9 + 0.62 * count for count in rows]
    figure = _figure((12, 0.5 + sum(heights)))
    panels = figure.subplots(len(events), squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    end_s = max(event.end_s for one in events.values() for event in one)
    for axes, (title, trace) in zip(panels, traces.items(), strict=True):
        _draw_rows(axes, events[title], trace.metadata.get("devices", []), end_s)
        axes.set_title(title, fontsize=10, loc="left")
    panels[-1].set_xlabel("seconds")
    from matplotlib.patches import Patch

    seen = {_kind(event) for one in events.values() for event in one if event.duration_s > 0}
    patches = [Patch(color=colour, label=name) for kind, (colour, name) in _KINDS.items() if kind in seen]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower right", ncols=len(patches), fontsize=8, frameon=False
        )
    _save(figure, path)


def draw_utilization(shares: Sequence[float], path: str | os.PathLike[str], title: str) -> None:
    """Draw the share of the step that each rank computes, for steps with too many ranks for a timeline."""
    figure = _figure((12, 3))
    axes = figure.subplots()
    axes.fill_between(range(len(shares)), shares, step="mid", color=_KINDS["F"][0])
    axes.set(xlabel="rank", ylabel="share of the step", ylim=(0, 1), xlim=(0, max(1, len(shares) - 1)))
    axes.set_title(title, fontsize=10, loc="left")
    _save(figure, path)


def figure_class() -> Any:
    """Return matplotlib's figures; raise HvpipeError if it is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HvpipeError(
            "A PNG needs matplotlib, which is not installed: pip install 'hvpipe[plot]'"
        ) from error
    return Figure


def _figure(size: tuple[float, float]) -> Any:
    return figure_class()(figsize=size, dpi=130, layout="constrained")


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    try:
        figure.savefig(path, format="png")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise HvpipeError(f"The PNG should go to a file that can be written. Received: {error}") from error


def _draw_rows(axes: Any, events: list[Event], devices: list[str], end_s: float) -> None:
    """Draw a row for each rank of one trace."""
    ranks = sorted({event.rank for event in events})
    for event in events:
        if event.duration_s <= 0:
            continue
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
    axes.set_xlim(0, end_s or 1)
    axes.spines[["top", "right"]].set_visible(False)


def _kind(event: Event) -> str:
    if event.lane == "compute":
        return str(event.args.get("kind", "F" if event.category == "forward" else "B"))
    return event.category


def _row_name(rank: int, devices: list[str]) -> str:
    return str(devices[rank]) if rank < len(devices) else f"rank {rank}"
