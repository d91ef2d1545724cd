"""What one rank's engine recorded, told as the events of a trace: steps, computing, buckets."""

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
UPDATE = "update "


def events_of_rank(raw: Sequence[Raw], rank: int) -> list[Event]:
    """Turn records into events.

    Marks are points in time: "begin" (a step has its batch), "step" (the engine was told of a step, which
    may be as late as the loss), "forward" (its loss was computed), "update B" (bucket B's variables were
    updated). Steps begin with the first of these that there is. From them and the buckets' packing come the
    spans of computing:

    step      |--------------------------------|-----
    forward   |-----------|
    backward              |---------------|          to the step's last pack
    pack                       --   --  --
    update                                    --     from the bucket's unpack

    Marks of computing count only where the processor packs: on a GPU they tell when work was enqueued.
    """
    spans = [r for r in raw if r[0] != "mark"]
    events = [
        Event(name, category, rank, _lane(category), start, end) for category, name, start, end in spans
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
    """A bucket's update runs from the end of its unpack, or its reduce, to the mark that says it is done.

    Where it also waits for other buckets, or for the next step, that is part of it: see hvpipe.trace.computing_time.
    """
    unpacked: dict[str, list[float]] = {}
    for category, name, _, end in spans:
        if category in ("unpack", "reduce"):
            unpacked.setdefault(name, []).append(end)
    for ends in unpacked.values():
        ends.sort()
    found = []
    for done_s, name in marks:
        bucket = name.removeprefix(UPDATE)
        ends = unpacked.get(bucket, []) if name.startswith(UPDATE) else []
        place = bisect_right(ends, done_s) - 1
        if place >= 0:
            found.append(Event(bucket, "update", rank, "update", ends[place], done_s))
    return found


def _lane(category: str) -> str:
    lanes = {"wait": "bucket waits", "reduce": "bucket reduces", "step": "steps"}
    # Spans of a pipeline's actions; data parallel steps leave marks.
    lanes |= dict.fromkeys(("forward", "backward"), "compute")
    return lanes.get(category, category)
