"""Turns the records of one rank's engine into trace events: steps, computing, buckets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from hvpipe.trace.events import Event

Raw = tuple[str, str, float, float]
"""(category, name, start_s, end_s), as the engine records them; marks have equal times."""

BEGIN = "begin"
STEP = "step"
FORWARD = "forward"
UPDATE_PREFIX = "update "


def events_of_rank(raw: Sequence[Raw], rank: int) -> list[Event]:
    """Turn an engine's records into events.

    Marks are points in time: "begin" (a step has its batch), "step" (the step was announced to the engine,
    perhaps only when its loss was known), "forward" (the step's loss was computed), "update B" (bucket B's
    variables were updated). A step begins with "begin", or with "step" if there is no "begin". The spans of
    computing follow from the marks and from the packing of buckets:

    step      |--------------------------------|-----
    forward   |-----------|
    backward              |---------------|          to the step's last pack
    pack                       --   --  --
    update                                    --     from the bucket's unpack

    Marks of computing are used only if the CPU packs. On a GPU, they would say when work was enqueued.
    """
    spans = [r for r in raw if r[0] != "mark"]
    events = [
        Event(name, category, rank, _track(category), start, end) for category, name, start, end in spans
    ]
    marks = sorted((start, name) for category, name, start, _ in raw if category == "mark")
    begun = BEGIN if any(name == BEGIN for _, name in marks) else STEP
    steps = [start for start, name in marks if name == begun]
    packs = sorted(end for category, _, _, end in spans if category == "pack")
    if not packs and any(category == "reduce" for category, *_ in spans):
        marks = [(start, name) for start, name in marks if name == begun]
    last_s = max((end for *_, end in raw), default=0.0)
    bounds = [*steps, last_s]
    for number, (start, end) in enumerate(pairwise(bounds)):
        events.append(Event(f"step {number}", "step", rank, "steps", start, end))
    for loss_s in (start for start, name in marks if name == FORWARD):
        place = bisect_right(steps, loss_s) - 1
        if place < 0:
            continue
        events.append(Event("forward", "forward", rank, "compute", steps[place], loss_s))
        last_pack = bisect_right(packs, bounds[place + 1]) - 1
        if last_pack >= 0 and packs[last_pack] > loss_s:
            events.append(Event("backward", "backward", rank, "compute", loss_s, packs[last_pack]))
    events.extend(_updates(spans, marks, rank))
    return sorted(events, key=lambda event: event.start_s)


def _updates(spans: Sequence[Raw], marks: Sequence[tuple[float, str]], rank: int) -> list[Event]:
    """Return the updates: each runs from the end of its bucket's unpack or reduce to the mark of its end.

    That includes waits for other buckets and for the next step, if any: see hvpipe.trace.computing_time.
    """
    unpacked: dict[str, list[float]] = {}
    for category, name, _, end in spans:
        if category in ("unpack", "reduce"):
            unpacked.setdefault(name, []).append(end)
    for ends in unpacked.values():
        ends.sort()
    found = []
    for done_s, name in marks:
        bucket = name.removeprefix(UPDATE_PREFIX)
        ends = unpacked.get(bucket, []) if name.startswith(UPDATE_PREFIX) else []
        place = bisect_right(ends, done_s) - 1
        if place >= 0:
            found.append(Event(bucket, "update", rank, "update", ends[place], done_s))
    return found


def _track(category: str) -> str:
    lanes = {"wait": "bucket waits", "reduce": "bucket reduces", "step": "steps"}
    # Pipelines record spans of their actions; data-parallel steps record marks.
    lanes |= dict.fromkeys(("forward", "backward"), "compute")
    return lanes.get(category, category)
