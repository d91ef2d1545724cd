"""Finds the fastest pipeline or hybrid by the forecast of its step: many starts, then local moves."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from hvpipe.search.exhaustive import every_layout, judge_all
from hvpipe.search.judge import Judge, Judged
from hvpipe.search.layout import StageLayout
from hvpipe.search.moves import Moves, improve, settle, try_better
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.starts import Starts
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

BUDGET = 5_000_000
"""The work of a search, as `Judge` counts it: some seconds."""

# The starts that are simulated, the most promising, and those of them that are improved.
_SIMULATED, _IMPROVED = 60, 6
# With many devices, fewer are simulated and improved.
_SIMULATED_OF_MANY, _IMPROVED_OF_MANY = 12, 2
# None of these may cost more than 4 times the budget that is left. Those below an eighth come first.
_OVERDRAFT, _CHEAP = 4, 8

# So many stages are tried however few the micro-batches are: devices of different types may each be fast on
# some layers.
_ANY_STAGES = 8

# The best layouts are changed at random so many times, with at most so many devices.
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
    ordered = sorted(layouts, key=judge.promise)
    judge.left = left  # however many there are, some must be simulated
    of_modes = ([one for one in ordered if one.mode == mode] for mode in ("pipeline", "hybrid", "data"))
    turns = zip_longest(*(of_mode[: simulated // 2] for of_mode in of_modes))
    promising = [one for turn in turns for one in turn if one is not None]
    if many:  # the simulation of a thousand stages may take the whole budget
        promising = [one for one in promising if judge.work_of(one) <= _OVERDRAFT * left]
        promising.sort(key=lambda one: judge.work_of(one) > left // _CHEAP)
    judged = [
        judge.judge(layout, judge.best.get(layout.mode) if many else None)
        for layout in (*starts.greedy(), *promising)
    ]
    ranked = _best_first(one for one in judged if one is not None)
    if every is not None and judge_all(judge, every, budget // 3):
        return judge.best
    ranked = _best_first([*_of_fewer(judge, stages, modes, budget // 4), *ranked])
    diverse = _diverse(ranked)
    for start in diverse[:improved]:
        improve(judge, moves, start)
    if not many:
        _settle_rest(judge, moves, [*diverse[improved:], *(one for one in ranked if one not in diverse)])
    if not many and len(cluster.devices) <= _KICKED_DEVICES:
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
    """Search the faster half of the devices, and judge the best layouts on all of them."""
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
    """Move the boundaries of the starts that are left, and improve what becomes the best of its mode."""
    for start in starts:
        settled = settle(judge, moves, start)
        if settled.fits and settled is judge.best.get(settled.layout.mode):
            improve(judge, moves, settled)


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
