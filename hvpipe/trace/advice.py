"""Says from a data-parallel run's own trace what its steps took, and what would make them shorter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.trace.computing_time import WHOLE_FORWARD, Interval, computing, length, merged, union, within
from hvpipe.trace.events import Trace

EVERY = 8
"""The steps of a round for which "local" is estimated."""

_WIRE_SHARES: Mapping[object, float] = {None: 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25}
"""What each compression sends of a float32 gradient's bytes."""
_FEW_RANKS = 63  # which "int8" can serve
_FIRST = 2  # steps that trace and warm up
_LEAST = 3  # steps that make a mean
_PAUSE = 0.5  # of a usual step: a longer time in which nothing is recorded is no part of a step
_WORTH, _MOST = 1.03, 3


@dataclass(frozen=True)
class StepParts:
    """The parts of a mean step, in seconds, on the rank that takes longest of its own. They add up to it.

    Args:
        rank: That rank.
        computing_s: Forward and backward.
        update_s: Only the optimizer computes.
        link_s: The rank does not compute, and a bucket is being reduced.
        waiting_s: It does neither, and a bucket is ready that other ranks do not have yet.
        rest_s: None of these: input, callbacks, Python.
        forward_s: Of `computing_s`, the forward.
        reducing_s: A bucket is being reduced, whether or not the rank computes.
        busy_s: The mean core of the rank's host is busy; 0 if that was not sampled. What only moves work
            cannot make a step shorter.
        late_s: What computing, update and rest take longer on this rank than in the mean of the ranks.
        ranks: How many ranks there are.
    """

    rank: int
    computing_s: float
    update_s: float
    link_s: float
    waiting_s: float
    rest_s: float
    forward_s: float
    reducing_s: float
    busy_s: float
    late_s: float
    ranks: int

    @property
    def own_s(self) -> float:
        """What the rank takes without the others."""
        return self.computing_s + self.update_s + self.rest_s

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.own_s + self.link_s + self.waiting_s


@dataclass(frozen=True)
class Change:
    """A change of a training, how many times as fast it would be, and whether it is another algorithm."""

    what: str
    speedup: float
    other_results: bool = False


def step_parts(trace: Trace) -> StepParts | None:
    """Return what a step took.

    Returns:
        None unless the trace has enough steps of a data-parallel run behind those that warm up.

    Raises:
        HvpipeError: Times are too large to add up.
    """
    if any(True for _ in trace.of("transfer")):
        return None  # a pipeline
    skipped = _FIRST + _whole_number(trace.metadata.get("trained_with"), "warmup_steps")
    try:
        found = [parts for rank in trace.ranks() if (parts := _parts_of(trace, rank, skipped)) is not None]
        if not found:
            return None
        slowest = max(found, key=lambda parts: parts.own_s)
        late_s = slowest.own_s - fmean(parts.own_s for parts in found)
    except (OverflowError, ValueError) as error:
        raise HvpipeError(f"In a trace, times should be seconds of a run. Received: {error}") from error
    values = {**vars(slowest), "late_s": late_s, "ranks": len(found)}
    return StepParts(**values)


def _whole_number(document: Any, name: str) -> int:
    value = document.get(name) if isinstance(document, dict) else 0
    return value if isinstance(value, int) and value > 0 else 0


def _parts_of(trace: Trace, rank: int, skipped: int) -> StepParts | None:
    steps = [(event.start_s, event.end_s) for event in trace.of("step", rank)][skipped:-1]
    forwards = [event for event in trace.of("forward", rank) if event.name == WHOLE_FORWARD]
    reduces = union(trace.of("reduce", rank))
    if len(steps) < _LEAST or not forwards or not reduces:
        return None
    spans = computing(trace, rank)
    model = merged([*spans["forward"], *spans["backward"]])
    busy = merged([*model, *spans["update"]])
    sent = merged([*busy, *reduces])
    known = merged([*sent, *union(trace.of("wait", rank))])
    columns = [_by_step(steps, each) for each in (model, busy, sent, known, spans["forward"], reduces)]
    rows = [(end_s - start_s, *row) for (start_s, end_s), *row in zip(steps, *columns, strict=True)]
    pause_s = _PAUSE * median(whole_s for whole_s, *_ in rows)
    usual_s = median(whole_s - known_s for whole_s, _, _, _, known_s, *_ in rows)
    rows = [row for row in rows if row[0] - row[4] <= usual_s + pause_s]  # an evaluation, a checkpoint
    whole_s, model_s, busy_s, sent_s, known_s, forward_s, reducing_s = map(fmean, zip(*rows, strict=True))
    if whole_s <= 0:
        return None
    return StepParts(
        rank,
        computing_s=model_s,
        update_s=busy_s - model_s,
        link_s=sent_s - busy_s,
        waiting_s=known_s - sent_s,
        rest_s=whole_s - known_s,
        forward_s=forward_s,
        reducing_s=reducing_s,
        busy_s=_busy_share(trace, rank, steps[0][0], steps[-1][1]) * whole_s,
        late_s=0.0,
        ranks=1,
    )


def _busy_share(trace: Trace, rank: int, start_s: float, end_s: float) -> float:
    """Return the mean share of the cores of the rank's host that are busy within a time; 0 if not known."""
    looks = [e for e in trace.of("utilization", rank) if e.name == "host busy"]
    spans = [
        (now.start_s - before.start_s, now.args.get("share"))
        for before, now in pairwise(looks)
        if start_s <= before.start_s and now.start_s <= end_s
    ]
    known = [(span_s, share) for span_s, share in spans if isinstance(share, int | float)]
    whole_s = sum(span_s for span_s, _ in known)
    return min(1.0, sum(span_s * share for span_s, share in known) / whole_s) if whole_s > 0 else 0.0


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


def changes(parts: StepParts, trained_with: Any) -> list[Change]:
    """Return what would help most, at most three changes, the best first.

    A change that sends less shortens the time in which buckets are reduced, and so at most the time in which
    the link is waited for. What the change itself computes is not counted. "local" hides an average behind
    the steps of a round. Twice the batch counts as twice the computing. Cores that are busy stay so: what
    only hides more does not free them.

    Args:
        parts: Of the run.
        trained_with: Its `overlap` and `compression` by name, as `data_parallel` takes them. Of other values
            nothing follows.
    """
    known = trained_with if isinstance(trained_with, dict) else {}
    overlap, compression = str(known.get("overlap", "")), known.get("compression", "")
    hidden_s = {
        "none": 0.0,
        "backward": parts.computing_s - parts.forward_s,
        "step": parts.computing_s,
        "stale": parts.computing_s,
        "local": parts.computing_s,
    }
    exact = overlap in ("none", "backward", "step")
    found: list[Change] = []

    def add(what: str, saved_s: float, other_results: bool = False) -> None:
        found.append(Change(what, parts.step_s / max(parts.step_s - saved_s, 1e-9), other_results))

    if exact and overlap != "step":
        saved_s = min(parts.link_s, parts.computing_s - hidden_s[overlap])
        add('overlap="step"', min(saved_s, parts.step_s - parts.busy_s))
    share = _WIRE_SHARES.get(compression) if isinstance(compression, str | None) else None
    if share is not None and overlap in hidden_s:
        for name in ("bf16", "int8"):
            smaller = _WIRE_SHARES[name] < share
            serves = name == "bf16" or (overlap != "stale" and parts.ranks <= _FEW_RANKS)
            if smaller and serves:
                saved_s = parts.reducing_s * (1 - _WIRE_SHARES[name] / share)
                add(f'compression="{name}"', min(parts.link_s, saved_s), other_results=True)
        if exact:
            left_s = max(0.0, parts.reducing_s / EVERY - parts.own_s)
            saved_s = parts.link_s - left_s + parts.waiting_s * (1 - 1 / EVERY)
            add(f'overlap="local", every={EVERY}', saved_s, other_results=True)
    add(f"smaller batches on rank {parts.rank}, larger ones elsewhere", parts.late_s)
    add("input and callbacks that take no time", parts.rest_s)
    if overlap in hidden_s:
        more_hidden_s = min(parts.link_s, hidden_s[overlap], parts.step_s - parts.busy_s)
        twice_s = parts.step_s + parts.computing_s - more_hidden_s
        found.append(Change("twice the batch, in samples per second", 2 * parts.step_s / twice_s, True))
    worth = [change for change in found if change.speedup >= _WORTH]
    return sorted(worth, key=lambda change: -change.speedup)[:_MOST]


def describe(parts: StepParts, found: Sequence[Change]) -> str:
    """Return what bounded the steps and what would help, in a few lines."""
    named = {
        "computing": parts.computing_s,
        "update": parts.update_s,
        "link": parts.link_s,
        "other ranks": parts.waiting_s,
        "input, callbacks, Python": parts.rest_s,
    }
    shares = [f"{name} {seconds / parts.step_s:.0%}" for name, seconds in named.items()]
    lines = [f"rank {parts.rank} takes longest: {', '.join(shares)} of its step"]
    if not found:
        return "\n".join([*lines, "no change that hvpipe knows would make it 3 % faster"])
    lines.append("what would help, estimated from this run's own times:")
    for change in found:
        other = " (another algorithm, other results)" if change.other_results else ""
        lines.append(f"  {change.what}: {change.speedup:.2f}x{other}")
    return "\n".join(lines)
