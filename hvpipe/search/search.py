"""Finds the fastest pipeline or hybrid by the forecast of its step: many starts, then local moves."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from hvpipe.search.exhaustive import every_layout, judge_all
from hvpipe.search.judge import Judge, Judged
from hvpipe.search.layout import StageLayout
from hvpipe.search.more_chunks import try_more_chunks
from hvpipe.search.moves import Moves, improve, settle, try_better
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.ports import PortTimes
from hvpipe.search.starts import Starts
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

BUDGET = 5_000_000
"""The work of a search, as `Judge` counts it: some seconds."""

# The starts that are simulated, the most promising, and those of them that are improved.
_SIMULATED, _IMPROVED = 60, 6
# With many devices, fewer are simulated.
_SIMULATED_OF_MANY, _IMPROVED_OF_MANY = 32, 8
# How many of those improved may differ by their cuts alone.
_CUTS_OF_MANY = 3
# How many top layouts to simulate again under other schedules, in each of two rounds.
_RESCHEDULED = 4
# None of these may cost more than 4 times the remaining budget. Those below a sixth come first.
_OVERDRAFT, _CHEAP = 4, 6

# How many stages are tried however few the micro-batches are: devices of different types may each be fast on
# some layers.
_ANY_STAGES = 8

# How often the best layouts are changed at random, and the most devices with which they are.
_KICKS, _KICKED_DEVICES = 200, 16
# What comes out is improved if its step is at most this much longer.
_PROMISING = 1.02


def search(
    profile: Profile,
    cluster: Cluster,
    choice: PipeliningChoice,
    stages: int | None = None,
    modes: Sequence[str] = ("pipeline", "hybrid"),
    budget: int = BUDGET,
    every_device: bool = False,
) -> dict[str, Judged]:
    """Find the fastest pipeline and the fastest hybrid.

    It cuts the model by several rules for several numbers of stages, orders and replicas, and simulates the
    most promising by a bound of the step. If there are few layouts, it then judges all. Otherwise it improves
    the best, and the best on the faster half of the devices, by local moves: boundaries, schedules, devices,
    stages. Then it changes the best at random, and improves what comes out. Equal arguments give equal
    results.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        choice: What is fixed and what is open.
        stages: The number of stages; None to choose it.
        modes: The modes to search.
        budget: The work to do.
        every_device: Whether the plan must use every device.

    Returns:
        The best layout of each mode for which one fits. A layout has more stages than micro-batches, and more
        than 8, only if `stages` says so or none with fewer fits.
    """
    judge = Judge(profile, cluster, choice, budget, every_device)
    if judge.model.sums.kept_bytes([len(profile.layers)], {})[0][0] > sum(judge.room_bytes.values()):
        return {}  # all devices together lack memory for the weights
    judge.most_groups = max(choice.microbatches, stages or 0, _ANY_STAGES)
    found = _search(judge, stages, modes)
    if not found and judge.most_groups < len(cluster.devices):
        # Only more stages than micro-batches may hold the model, such as one sample over several devices.
        judge.most_groups = len(cluster.devices)
        judge.left = budget
        found = _search(judge, stages, modes)
    if "pipeline" in modes and stages is None:
        try_more_chunks(judge, budget)
    return found


def _search(judge: Judge, stages: int | None, modes: Sequence[str]) -> dict[str, Judged]:
    """Search with at most the judge's number of groups, within its budget."""
    cluster, budget, many = judge.cluster, judge.left, judge.many
    starts = Starts(judge, stages, modes)
    moves = Moves(judge, starts, stages is None, modes)
    simulated, improved = (_SIMULATED_OF_MANY, _IMPROVED_OF_MANY) if many else (_SIMULATED, _IMPROVED)
    every = every_layout(judge, stages, modes)
    layouts = list(starts.layouts())
    left = max(judge.left, budget // 2)
    promise = _promise_with_ports(judge) if many else judge.promise
    promises = {layout: promise(layout) for layout in layouts}
    ordered = sorted(layouts, key=promises.__getitem__)
    judge.left = left  # however many there are, some must be simulated
    if many:
        ordered = _varied(ordered, {layout for layout in layouts if not promises[layout][0]})
    of_modes = ([one for one in ordered if one.mode == mode] for mode in ("pipeline", "hybrid", "data"))
    turns = zip_longest(*(of_mode[: simulated // 2] for of_mode in of_modes))
    promising = [one for turn in turns for one in turn if one is not None]
    if many:
        ranked = _judge_of_many(judge, moves, [*starts.greedy(), *promising])
    else:
        judged = [judge.judge(layout) for layout in (*starts.greedy(), *promising)]
        ranked = _best_first(one for one in judged if one is not None)
    if every is not None and judge_all(judge, every, budget // 3):
        return judge.best
    ranked = _best_first([*_of_fewer(judge, stages, modes, budget // 4), *ranked])
    diverse = _diverse(ranked)
    if many:
        _improve_in_turn(judge, moves, list(dict.fromkeys((*ranked[:_CUTS_OF_MANY], *diverse)))[:improved])
        return judge.best
    for start in diverse[:improved]:
        improve(judge, moves, start)
    _settle_rest(judge, moves, [*diverse[improved:], *(one for one in ranked if one not in diverse)])
    if len(cluster.devices) <= _KICKED_DEVICES:
        _kick(judge, moves)
    return judge.best


def faster_halves(profile: Profile, cluster: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with the faster half of its devices, with a quarter, and so on.

    Of devices that are as fast, those with more memory come first, and then those listed first.
    """
    while (count := len(cluster.devices) // 2) > 0:
        ranked = sorted(cluster.devices, key=lambda device: (-profile.speed(device), -device.room_bytes))
        cluster = cluster.only({device.name for device in ranked[:count]})
        yield cluster


def _of_fewer(judge: Judge, stages: int | None, modes: Sequence[str], budget: int) -> list[Judged]:
    """Search the faster half of the devices, and judge the best layouts on all of them.

    With many devices that are alike there is no faster half: the starts leave devices idle.
    """
    if judge.many and _are_alike(judge.cluster):
        return []
    half = next(faster_halves(judge.profile, judge.cluster), None)
    if half is None or judge.every_device or (stages or 1) > len(half.devices) * judge.choice.usual.chunks:
        return []
    fewer = Judge(judge.profile, half, judge.choice, budget)
    fewer.most_groups, fewer.many = judge.most_groups, judge.many
    judged = []
    for one in _search(fewer, stages, modes).values():
        judge.left = max(judge.left, 1)  # these few count in any case
        judged.append(judge.judge(one.layout))
    return [one for one in judged if one is not None]


def _are_alike(cluster: Cluster) -> bool:
    """Tell whether all hosts have the same links and the same devices."""
    hosts = {
        (host.link, host.inner, tuple(replace(device, name="") for device in host.devices))
        for host in cluster.hosts
    }
    return len(hosts) == 1 and not cluster.measured


def _kick(judge: Judge, moves: Moves) -> None:
    """Change the devices of the best layouts twice at random, and improve what may come out better."""
    draw = random.Random(0)
    for _ in range(_KICKS):
        for best in list(judge.best.values()):
            if judge.left <= 0:
                return
            layout = best.layout
            for _ in range(2):
                layout = moves.any_devices(layout, draw)
            settled = try_better(judge, moves, layout, best)
            if settled is not None and settled.step_s < _PROMISING * best.step_s:
                improve(judge, moves, settled)


def _settle_rest(judge: Judge, moves: Moves, starts: Iterable[Judged]) -> None:
    """Move the boundaries of the remaining starts, and improve what becomes the best of its mode."""
    for start in starts:
        settled = settle(judge, moves, start)
        if settled.fits and settled is judge.best.get(settled.layout.mode):
            improve(judge, moves, settled)


def _judge_of_many(judge: Judge, moves: Moves, promising: Sequence[StageLayout]) -> list[Judged]:
    """Judge layouts of many devices, and the best of them under other schedules; those that cost least first.

    The simulation of a thousand stages may take the whole budget.
    """
    left = judge.left
    work = {layout: judge.work_of(layout) for layout in promising}
    cheap = [layout for layout in promising if work[layout] <= left // _CHEAP]
    costly = [layout for layout in promising if left // _CHEAP < work[layout] <= _OVERDRAFT * left]
    judged: list[Judged] = []
    for layouts in (cheap, costly):
        half = judge.left // 2
        for layout in layouts:
            one = judge.judge(layout, judge.best.get(layout.mode)) if judge.left > half else None
            judged += [] if one is None else [one]
        ranked = _best_first(judged)
        for start in dict.fromkeys((*_diverse(ranked)[:_RESCHEDULED], *ranked[:_RESCHEDULED])):
            others = [judge.judge(each, start) for each in moves.schedules(start.layout)]
            judged += [one for one in others if one is not None]
    return _best_first(dict.fromkeys(judged))


def _improve_in_turn(judge: Judge, moves: Moves, starts: Sequence[Judged]) -> None:
    """Improve starts, each with half of the work that is left: the best may end where no move helps."""
    for start in starts:
        rest = judge.left // 2
        judge.left -= rest
        improve(judge, moves, start)
        judge.left += rest


def _promise_with_ports(judge: Judge) -> Callable[[StageLayout], tuple[float, float]]:
    """Return the judge's promise, with at least the seconds of the busiest port."""
    ports = PortTimes(judge.model, judge.choice.microbatches)

    def promise(layout: StageLayout) -> tuple[float, float]:
        missing_bytes, bound_s = judge.promise(layout)
        if missing_bytes or len(layout.devices) == 1:
            return missing_bytes, bound_s
        return missing_bytes, max(bound_s, ports.busiest_s(layout))

    return promise


def _varied(layouts: Sequence[StageLayout], fitting: Container[StageLayout]) -> list[StageLayout]:
    """Put the first layout that fits of each number and kind of groups before the others."""
    firsts: dict[object, StageLayout] = {}
    for one in layouts:
        if one in fitting:
            firsts.setdefault((len(one.groups), one.groups[0]), one)
    return list(dict.fromkeys((*firsts.values(), *layouts)))


def _best_first(judged: Iterable[Judged]) -> list[Judged]:
    return sorted(judged, key=lambda one: (one.missing_bytes, one.step_s))


def _diverse(ranked: Sequence[Judged]) -> list[Judged]:
    """Put the best of each mode, number of stages and chunks first, then the best of each set of groups."""
    found: dict[StageLayout, Judged] = {}
    for key in (_mode_and_stages, _groups):
        firsts: dict[object, Judged] = {}
        for one in ranked:
            firsts.setdefault(key(one.layout), one)
        found |= {one.layout: one for one in firsts.values()}
    return list(found.values())


def _mode_and_stages(layout: StageLayout) -> object:
    return layout.mode, len(layout.groups), layout.chunks


def _groups(layout: StageLayout) -> object:
    return layout.groups
