"""Says from a data-parallel run's own trace what its steps took, and what would make them shorter."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from statistics import fmean, median
from typing import Any

from hvpipe.errors import HvpipeError
from hvpipe.plan.compression import MOST_RANKS
from hvpipe.trace.computing_time import WHOLE_FORWARD, Interval, computing, length, merged, union, within
from hvpipe.trace.events import Event, Trace

EVERY = 8
"""The steps of a round for which "local" is estimated."""

_WIRE_SHARES: Mapping[object, float] = {None: 1.0, "bf16": 0.5, "fp16": 0.5, "int8": 0.25}
"""What each compression sends of a float32 gradient's bytes."""
_FIRST = 2  # steps that trace and warm up
_LEAST = 3  # steps that make a mean
_PAUSE = 0.5  # of a usual step: a longer time in which nothing is recorded is no part of a step
_WORTH, _MOST = 1.03, 3
_LATENCY_S = 200e-6  # of a reduce, whatever its size: an estimate for ranks whose cores compute meanwhile
_SMALL_S, _SMALL_SHARE = 0.02, 0.2  # a step, of which this share does not depend on its size
_FIGURES = {
    "host busy": "share",
    "cores busy with this rank": "cores",
    "cores busy with communication": "cores",
}
_LEAST_CORES = 0.1  # that a rank computes on: with less, samples and events do not belong together
_MOST_SLOWED = 0.5  # of computing: two threads share a core equally
_FULL = 0.9  # of the computing time: no cores are free beside it if the host is busy for so long
_OTHER = "another algorithm, other results"


@dataclass(frozen=True)
class StepParts:
    """The parts of a mean step, in seconds, on the rank that takes longest of its own. They add up to it.

    Args:
        rank: That rank.
        computing_s: Forward and backward.
        update_s: Only the optimizer computes.
        link_s: The rank does not compute, and a bucket that all ranks have is being reduced.
        waiting_s: It does neither, and a bucket is ready that other ranks do not have yet.
        rest_s: None of these: input, callbacks, Python.
        forward_s: Of `computing_s`, the forward.
        reducing_s: A bucket that all ranks have is being reduced, whether or not the rank computes.
        busy_s: The mean core of the rank's host is busy; 0 if that was not sampled. What only moves work
            cannot make a step shorter.
        late_s: What computing, update and rest take longer on this rank than in the mean of the ranks.
        ranks: How many ranks there are.
        reduces: How many buckets are reduced in a step.
        moving_s: What the rank would take to move a step's data on the cores that it computes on, if it did
            nothing else; 0 if cores are free for it, or it is not known.
        onednn: Whether TensorFlow computed with oneDNN; None: not known.
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
    reduces: float = 0.0
    moving_s: float = 0.0
    onednn: bool | None = None

    @property
    def own_s(self) -> float:
        """What the rank takes without the others."""
        return self.computing_s + self.update_s + self.rest_s

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.own_s + self.link_s + self.waiting_s

    @property
    def slowed_s(self) -> float:
        """Of `computing_s`, what moving data beside it takes of the cores."""
        beside = 1 - self.link_s / self.reducing_s if self.reducing_s > 0 else 0.0
        return min(self.moving_s * max(0.0, beside), _MOST_SLOWED * self.computing_s)

    @property
    def latency_s(self) -> float:
        """What the link would take for buckets without bytes."""
        return min(self.reducing_s, _LATENCY_S * self.reduces)


@dataclass(frozen=True)
class Change:
    """A change of a training, how many times as fast it would be, and what else it changes; "" if nothing."""

    what: str
    speedup: float
    note: str = ""


def step_parts(trace: Trace) -> StepParts | str:
    """Return what a step took, or why the trace does not say it.

    Raises:
        HvpipeError: Times are too large to add up.
    """
    trained_with = trace.metadata.get("trained_with")
    overlap = trained_with.get("overlap") if isinstance(trained_with, dict) else None
    if any(True for _ in trace.of("transfer")):
        return "the trace is a pipeline's"
    if overlap in ("local", "stale"):
        return f'with overlap="{overlap}" a trace does not tell computing from waiting'
    skipped = _FIRST + _whole_number(trained_with, "warmup_steps")
    try:
        late = _before_the_last_rank(trace)
        found = [_parts_of(trace, rank, skipped, late[rank]) for rank in trace.ranks()]
        known = [parts for parts in found if isinstance(parts, StepParts)]
        if not known:
            return next((why for why in found if isinstance(why, str)), "the trace is empty")
        slowest = max(known, key=lambda parts: parts.own_s)
        late_s = slowest.own_s - fmean(parts.own_s for parts in known)
    except (OverflowError, ValueError) as error:
        raise HvpipeError(f"In a trace, times should be seconds of a run. Received: {error}") from error
    onednn = trained_with.get("onednn") if isinstance(trained_with, dict) else None
    onednn = onednn if isinstance(onednn, bool) else None
    return replace(slowest, late_s=late_s, ranks=len(known), onednn=onednn)


def _whole_number(document: Any, name: str) -> int:
    value = document.get(name) if isinstance(document, dict) else 0
    return value if isinstance(value, int) and value > 0 else 0


def _before_the_last_rank(trace: Trace) -> dict[int, list[Interval]]:
    """Return by rank when a bucket counted as being reduced, although another rank did not have it yet.

    A wait begins when its rank has the bucket. Its end says nothing: a rank begins to send before others are
    ready.
    """
    ranks = trace.ranks()
    waits, reduces = ({rank: _by_name(trace.of(what, rank)) for rank in ranks} for what in ("wait", "reduce"))
    found: dict[int, list[Interval]] = {rank: [] for rank in ranks}
    for name in {name for of_rank in reduces.values() for name in of_rank}:
        ready = [waits[rank].get(name, []) for rank in ranks]
        reduced = [reduces[rank].get(name, []) for rank in ranks]
        if len({len(each) for each in [*ready, *reduced]}) > 1:
            continue  # the trace lacks some
        for *waited, in_turn in zip(*ready, list(zip(*reduced, strict=True)), strict=True):
            last_s = max(event.start_s for event in waited)
            for rank, event in zip(ranks, in_turn, strict=True):
                if last_s > event.start_s:
                    found[rank].append((event.start_s, min(last_s, event.end_s)))
    return {rank: merged(spans) for rank, spans in found.items()}


def _by_name(events: Iterable[Event]) -> dict[str, list[Event]]:
    found: dict[str, list[Event]] = {}
    for event in events:
        found.setdefault(event.name, []).append(event)
    return found


def _parts_of(trace: Trace, rank: int, skipped: int, late: Sequence[Interval]) -> StepParts | str:
    steps = [(event.start_s, event.end_s) for event in trace.of("step", rank)][skipped:-1]
    forwards = [event for event in trace.of("forward", rank) if event.name == WHOLE_FORWARD]
    reduces = _without(union(trace.of("reduce", rank)), late)
    if not reduces:
        return "nothing was reduced over ranks"
    if not forwards:
        return "the trace does not say when a step computes, as on GPUs and with loops of your own"
    if len(steps) < _LEAST:
        return f"the trace needs at least {skipped + _LEAST + 1} steps, of which the first {skipped} warm up"
    if 2 * _begun_within(steps, trace.of("backward", rank)) < len(steps):
        return "most steps reduce nothing, as with accumulated gradients"
    spans = computing(trace, rank)
    model = merged([*spans["forward"], *spans["backward"]])
    busy = merged([*model, *spans["update"]])
    sent = merged([*busy, *reduces])
    known = merged([*sent, *late, *union(trace.of("wait", rank))])
    columns = [_by_step(steps, each) for each in (model, busy, sent, known, spans["forward"], reduces)]
    rows = [(end_s - start_s, *row) for (start_s, end_s), *row in zip(steps, *columns, strict=True)]
    pause_s = _PAUSE * median(whole_s for whole_s, *_ in rows)
    usual_s = median(whole_s - known_s for whole_s, _, _, _, known_s, *_ in rows)
    rows = [row for row in rows if row[0] - row[4] <= usual_s + pause_s]  # an evaluation, a checkpoint
    whole_s, model_s, busy_s, sent_s, known_s, forward_s, reducing_s = map(fmean, zip(*rows, strict=True))
    if whole_s <= 0:
        return "its steps take no time"
    host_s, used_s, moved_s = (
        whole_s * _mean_figure(trace, rank, name, (steps[0][0], steps[-1][1])) for name in _FIGURES
    )
    waited_share = (sent_s - busy_s) / reducing_s if reducing_s > 0 else 0.0
    cores = (used_s - moved_s * waited_share) / max(busy_s, 1e-9)  # that it computes on
    shared = cores > _LEAST_CORES and host_s >= _FULL * busy_s
    return StepParts(
        rank,
        computing_s=model_s,
        update_s=busy_s - model_s,
        link_s=sent_s - busy_s,
        waiting_s=known_s - sent_s,
        rest_s=whole_s - known_s,
        forward_s=forward_s,
        reducing_s=reducing_s,
        busy_s=min(host_s, whole_s),
        late_s=0.0,
        ranks=1,
        moving_s=moved_s / cores if shared else 0.0,
        reduces=_begun_within(steps, trace.of("reduce", rank)) / len(steps),
    )


def _begun_within(steps: Sequence[Interval], events: Iterable[Event]) -> int:
    """Return how many events begin within the steps."""
    return sum(steps[0][0] <= event.start_s <= steps[-1][1] for event in events)


def _mean_figure(trace: Trace, rank: int, name: str, time: Interval) -> float:
    """Return the mean of a sampled figure of a rank within a time; 0 if not known."""
    looks = [event for event in trace.of("utilization", rank) if event.name == name]
    spans = [
        (now.start_s - before.start_s, now.args.get(_FIGURES[name]))
        for before, now in pairwise(looks)
        if time[0] <= before.start_s and now.start_s <= time[1]
    ]
    known = [
        (span_s, value) for span_s, value in spans if isinstance(value, int | float) and 0 <= value < inf
    ]
    whole_s = sum(span_s for span_s, _ in known)
    return sum(span_s * value for span_s, value in known) / whole_s if whole_s > 0 else 0.0


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time of `intervals` that `others` do not cover; each is disjoint and in order."""
    edges = [0.0, *(edge for interval in others for edge in interval), inf]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return within(intervals, [gap for gap in gaps if gap[0] < gap[1]])


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

    A change that sends less shortens the time in which buckets are reduced, but for their latency, and so at
    most the time in which the link is waited for. What the change itself computes is not counted. "local"
    hides an average behind the steps of a round. Twice the batch counts as twice the computing. Data that
    moves on the cores that compute slows computing. "local" moves less, so it slows it less; twice the batch
    moves as much, so it slows it as long. Cores that are busy stay so: what only hides more does not free
    them.

    Args:
        parts: Of the run.
        trained_with: Its `overlap` and `compression` by name, as `data_parallel` takes them, and what it
            `refuses`. Of other values nothing follows.
    """
    known = trained_with if isinstance(trained_with, dict) else {}
    overlap, compression = str(known.get("overlap", "")), known.get("compression", "")
    refused = known.get("refuses")
    refused = refused if isinstance(refused, list) else []
    hidden_s = {"none": 0.0, "backward": parts.computing_s - parts.forward_s, "step": parts.computing_s}
    found: list[Change] = []

    def add(what: str, saved_s: float, note: str = "") -> None:
        found.append(Change(what, parts.step_s / max(parts.step_s - saved_s, 1e-9), note))

    if overlap in hidden_s:
        free_s = parts.step_s - parts.busy_s
        add('overlap="step"', min(parts.link_s, parts.computing_s - hidden_s[overlap], free_s))
        more_hidden_s = min(parts.link_s, hidden_s[overlap], free_s)
        twice_s = parts.step_s + parts.computing_s - parts.slowed_s - more_hidden_s
        what = "twice the batch, in samples per second"
        found.append(Change(what, 2 * parts.step_s / twice_s, "steps of another size, other results"))
        if "local" not in refused:
            left_s = max(0.0, parts.reducing_s / EVERY - parts.own_s)
            saved_s = parts.link_s - left_s + parts.waiting_s * (1 - 1 / EVERY)
            saved_s += parts.slowed_s - parts.moving_s / EVERY
            add(f'overlap="local", every={EVERY}', saved_s, _OTHER)
    share = _WIRE_SHARES.get(compression) if isinstance(compression, str | None) else None
    if share is not None and overlap in hidden_s:
        for name, note in (("bf16", "rounds the sums"), ("int8", _OTHER)):
            serves = name not in refused and (name != "int8" or parts.ranks <= MOST_RANKS)
            if serves and _WIRE_SHARES[name] < share:
                saved_s = (parts.reducing_s - parts.latency_s) * (1 - _WIRE_SHARES[name] / share)
                add(f'compression="{name}"', min(parts.link_s, saved_s), note)
    add(f"smaller batches on rank {parts.rank}, larger ones elsewhere", parts.late_s)
    add("input and callbacks that take no time", parts.rest_s)
    worth = [change for change in found if change.speedup >= _WORTH]
    return sorted(worth, key=lambda change: -change.speedup)[:_MOST]


def describe(parts: StepParts, found: Sequence[Change]) -> str:
    """Return what bounded the steps and what would help, in a few lines."""
    named = {
        "computing": parts.computing_s,
        "update": parts.update_s,
        "link": parts.link_s,
        "late ranks": parts.waiting_s,
        "input, callbacks, Python": parts.rest_s,
    }
    largest = sorted(named.items(), key=lambda pair: -pair[1])
    shares = [f"{name} {seconds / parts.step_s:.0%}" for name, seconds in largest]
    lines = [f"a step of rank {parts.rank}: {', '.join(shares)}"]
    if parts.late_s / parts.step_s >= _WORTH - 1:
        late = f"{parts.late_s / parts.step_s:.0%}"
        lines.append(f"rank {parts.rank} takes longest of all: {late} of a step more than the mean rank")
    if parts.onednn is False and parts.computing_s > parts.step_s / 2:
        lines.append(
            "TensorFlow computed without oneDNN, as it does on CPUs without AVX-512: try "
            "TF_ENABLE_ONEDNN_OPTS=1, which rounds otherwise and may make convolutions much faster"
        )
    fixed_s = parts.rest_s + min(parts.link_s, parts.latency_s)
    if parts.step_s < _SMALL_S and fixed_s / parts.step_s > _SMALL_SHARE:
        lines.append(
            f"steps are small, {1e3 * parts.step_s:.1f} ms: larger batches, or steps_per_execution in "
            f"compile, share the {fixed_s / parts.step_s:.0%} that do not depend on their size"
        )
    if not found:
        return "\n".join([*lines, "no change that hvpipe knows would make it 3 % faster"])
    lines.append("what would help, estimated from this run's own times:")
    for change in found:
        lines.append(f"  {change.what}: {change.speedup:.2f}x{f' ({change.note})' if change.note else ''}")
    return "\n".join(lines)
