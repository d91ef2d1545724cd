"""Says from a data-parallel run's own trace what its steps took, and what would make them shorter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from hvpipe.trace.computing_time import Interval, computing, length, merged, union, within
from hvpipe.trace.events import Trace

EVERY = 8
"""The steps of a round for which "local" is estimated."""

_WIRE_SHARES = {None: 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25}  # of a float32 gradient's bytes
_EXACT = ("none", "backward", "step")  # modes by what communication may hide behind, the least first
_UNTYPICAL = 1.5  # times the median: a step that waited for something else, such as an evaluation
_FIRST = 2  # steps that trace and warm up
_WORTH = 1.03
_MOST = 3


@dataclass(frozen=True)
class StepParts:
    """The parts of a mean step, in seconds, on the rank that computes longest. The first four add up to it.

    Args:
        rank: That rank.
        computing_s: Forward and backward.
        update_s: Only the optimizer computes.
        exposed_s: A bucket is being reduced, and the rank does not compute.
        between_s: Neither: input, callbacks, Python.
        forward_s: Of `computing_s`, the forward.
        reducing_s: A bucket is being reduced, whether or not the rank computes.
        late_s: What this rank computes longer than the mean rank.
    """

    rank: int
    computing_s: float
    update_s: float
    exposed_s: float
    between_s: float
    forward_s: float
    reducing_s: float
    late_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.computing_s + self.update_s + self.exposed_s + self.between_s


@dataclass(frozen=True)
class Change:
    """A change of a training, how many times as fast it would be, and whether the weights stay the same."""

    what: str
    speedup: float
    exact: bool


def step_parts(trace: Trace) -> StepParts | None:
    """Return what a step took; None unless the trace has steps of a data-parallel run."""
    found = {rank: parts for rank in trace.ranks() if (parts := _parts_of(trace, rank)) is not None}
    if not found:
        return None
    computes_s = {rank: parts[0] + parts[1] for rank, parts in found.items()}
    rank = max(computes_s, key=computes_s.__getitem__)
    computing_s, update_s, exposed_s, between_s, forward_s, reducing_s = found[rank]
    late_s = computes_s[rank] - fmean(computes_s.values())
    return StepParts(rank, computing_s, update_s, exposed_s, between_s, forward_s, reducing_s, late_s)


def _parts_of(trace: Trace, rank: int) -> tuple[float, ...] | None:
    steps = [(event.start_s, event.end_s) for event in trace.of("step", rank)][_FIRST:-1]
    reduces = union(trace.of("reduce", rank))
    spans = computing(trace, rank)
    if not steps or not reduces or not spans["forward"]:
        return None
    usual_s = median(end_s - start_s for start_s, end_s in steps)
    typical = [
        place for place, (start_s, end_s) in enumerate(steps) if end_s - start_s <= _UNTYPICAL * usual_s
    ]
    model = merged([*spans["forward"], *spans["backward"]])
    busy = merged([*model, *spans["update"]])
    whole = (model, busy, reduces, within(reduces, busy), spans["forward"])
    sums = [_by_step(steps, intervals) for intervals in whole]
    model_s, busy_s, reducing_s, hidden_s, forward_s = (fmean(each[p] for p in typical) for each in sums)
    step_s = fmean(steps[place][1] - steps[place][0] for place in typical)
    exposed_s = reducing_s - hidden_s
    between_s = max(0.0, step_s - busy_s - exposed_s)
    return model_s, busy_s - model_s, exposed_s, between_s, forward_s, reducing_s


def _by_step(steps: Sequence[Interval], intervals: Sequence[Interval]) -> list[float]:
    """Return the seconds of disjoint intervals within each step."""
    starts = [start_s for start_s, _ in steps]
    found = [0.0] * len(steps)
    for start_s, end_s in within(merged(steps), intervals):
        place = max(0, bisect_right(starts, start_s) - 1)
        while place < len(steps) and steps[place][0] < end_s:
            found[place] += length(within([(start_s, end_s)], [steps[place]]))
            place += 1
    return found


def changes(parts: StepParts, trained_with: Mapping[str, object]) -> list[Change]:
    """Return what would help most, at most three changes, the best first.

    A change that sends less shortens the time in which buckets are reduced, and so at most its exposed part.
    What the change itself computes is not counted. Twice the batch counts as twice the computing.

    Args:
        parts: Of the run.
        trained_with: Its `overlap` and `compression`, as in `data_parallel`.
    """
    overlap, compression = trained_with.get("overlap"), trained_with.get("compression")
    step_s, exposed_s = parts.step_s, parts.exposed_s
    found: list[Change] = []

    def add(what: str, saved_s: float, exact: bool) -> None:
        found.append(Change(what, step_s / max(step_s - saved_s, 1e-9), exact))

    if overlap in _EXACT[:2]:
        hides_s = parts.forward_s if overlap == "backward" else parts.computing_s
        add('overlap="step"', min(exposed_s, hides_s), True)
    if overlap in _EXACT and compression in _WIRE_SHARES:
        share = _WIRE_SHARES[compression]
        for name, of_it in (("bf16", 0.5), ("int8", 0.25)):
            if of_it < share:
                add(f'compression="{name}"', min(exposed_s, parts.reducing_s * (1 - of_it / share)), False)
        add(f'overlap="local", every={EVERY}', min(exposed_s, parts.reducing_s * (1 - 1 / EVERY)), False)
    add(f"smaller batches on rank {parts.rank}, larger ones elsewhere", parts.late_s, True)
    add("faster input and callbacks", parts.between_s, True)
    more_s = 2 * parts.computing_s + parts.update_s + parts.between_s
    hides_more_s = parts.computing_s if overlap in _EXACT[1:] else 0.0
    twice_s = more_s + max(0.0, exposed_s - hides_more_s)
    found.append(Change("twice the batch, samples per second", 2 * step_s / twice_s, False))
    worth = [change for change in found if change.speedup >= _WORTH]
    return sorted(worth, key=lambda change: -change.speedup)[:_MOST]


def describe(parts: StepParts, found: Sequence[Change]) -> str:
    """Return what bounded the steps and what would help, in a few lines."""
    named = {
        "computing": parts.computing_s,
        "update": parts.update_s,
        "link": parts.exposed_s,
        "input, callbacks and Python": parts.between_s,
    }
    shares = [f"{name} {seconds / parts.step_s:.0%}" for name, seconds in named.items()]
    lines = [f"a step of rank {parts.rank}, which computes longest: {', '.join(shares)}"]
    if not found:
        return "\n".join([*lines, "no change that hvpipe knows would make it 3 % faster"])
    lines.append("what would help, estimated from this run's own times:")
    for change in found:
        lines.append(f"  {change.what}: {change.speedup:.2f}x{'' if change.exact else ' (other results)'}")
    return "\n".join(lines)
