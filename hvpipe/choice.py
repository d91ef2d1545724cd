"""Chooses between data parallel, pipeline and hybrid for a model and a cluster, by the simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from hvpipe.data_parallel_forecast import data_parallel
from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast import Forecast, forecast
from hvpipe.plan.partition import partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group, grouped, groupings, ungrouped
from hvpipe.plan.shortage import amount
from hvpipe.plan.stages import Plan
from hvpipe.profile import Profile
from hvpipe.topology import Cluster

# Of more devices than this, not every number of stages is tried.
_FEW = 8


@dataclass(frozen=True)
class Candidate:
    """The best found of one mode: its forecast, or why there is none."""

    mode: str
    forecast: Forecast | None
    refused: str = ""


def candidates(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None = None
) -> list[Candidate]:
    """The best of every mode, the fastest first; modes that do not fit last.

    Several samples make a micro-batch, and a step has `pipelining.microbatches` of them in each mode.
    With `stages`, pipelines and hybrids have so many.
    """
    found = [candidate(mode, profile, cluster, pipelining, stages) for mode in MODES]
    return sorted(found, key=lambda one: one.forecast.step_s if one.forecast else float("inf"))


def candidate(
    mode: str, profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None = None
) -> Candidate:
    """The best found of one mode."""
    if mode not in MODES:
        raise HvpipeError(f"mode should be one of {', '.join(MODES)}. Received: mode={mode!r}")
    best: Forecast | None = None
    refused = ""
    try:
        for tried in MODES[mode](profile, cluster, pipelining, stages):
            if missing := tried.shortages(cluster):
                refused = refused or _missing(missing)
            elif best is None or tried.step_s < best.step_s * (1 - 1e-9):
                best = tried
    except PlanError as error:
        refused = refused or str(error)
    return Candidate(mode, best, "" if best else refused or "no way found to give a stage several devices")


def choose(profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None = None) -> Forecast:
    """The fastest step of all modes; PlanError, which says what each lacks, where none fits."""
    found = candidates(profile, cluster, pipelining, stages)
    if found[0].forecast is None:
        raise PlanError(
            "The model should fit the devices in some mode. Received: "
            + "; ".join(f"{one.mode}: {one.refused}" for one in found)
        )
    return found[0].forecast


def _data(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None
) -> Iterator[Forecast]:
    """The whole share at once; or micro-batch by micro-batch, which stashes less and shares less finely."""
    yield data_parallel(profile, cluster, pipelining)
    if pipelining.chunks == 1:
        everywhere = tuple(device.name for device in cluster.devices)
        placement = [(everywhere, range(len(profile.layers)))]
        yield from _foreseen(Plan.of(profile, cluster, placement, pipelining, "data"), profile, cluster)


def _pipelines(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None
) -> Iterator[Forecast]:
    """The greedy partition for each number of stages; of many, for those that `_next_count` names."""
    if stages is not None:
        yield forecast(partition(profile, cluster, stages, pipelining), profile, cluster)
        return
    chunks = pipelining.chunks
    most = min(len(cluster.devices), len(profile.layers) // chunks, pipelining.microbatches)
    refused: PlanError | None = None
    steps_s: dict[int, float] = {}
    while count := _next_count(steps_s, most, cluster):
        steps_s[count] = math.inf
        try:
            one = forecast(partition(profile, cluster, count * chunks, pipelining), profile, cluster)
        except PlanError as error:
            refused = error
            continue
        if not one.shortages(cluster):
            steps_s[count] = one.step_s
        yield one
    if refused is not None:
        raise refused


def _next_count(steps_s: dict[int, float], most: int, cluster: Cluster) -> int:
    """The number of devices to try next, up to `most`, after those whose steps are known; 0 for no more.

    First those of `_counts`, and all that are faster than the rest by a tenth; then between the best one and
    those next to it, until there are none. Where nothing fits, every number.
    """
    speeds = sorted((device.speed for device in cluster.devices), reverse=True)
    drops = [count for count in range(1, most) if speeds[count] < 0.9 * speeds[count - 1]]
    for count in sorted({*_counts(most), *drops}):
        if count not in steps_s:
            return count
    best = min(steps_s, key=lambda count: steps_s[count], default=0)
    if best and math.isinf(steps_s[best]):
        return next((count for count in range(1, most + 1) if count not in steps_s), 0)
    gaps = [(b - a, a) for a, b in pairwise(sorted(steps_s)) if best in (a, b)]
    width, start = max(gaps, default=(0, 0))
    return start + width // 2 if width > 1 else 0


def _hybrids(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None
) -> Iterator[Forecast]:
    """Stages with replicas: whole pipelines side by side, and where the next device helps most."""
    if pipelining.chunks > 1:
        raise PlanError("A stage with replicas needs a schedule without chunks.")
    most = min(len(cluster.devices), len(profile.layers), pipelining.microbatches)
    for count in _counts(most)[1:] if stages is None else [stages]:
        if count < pipelining.least_stages:
            continue
        for groups in groupings(cluster, count):
            yield from _cut(profile, cluster, pipelining, groups)
        if count < len(cluster.devices):
            yield from _grown(profile, cluster, pipelining, count)


def _cut(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, groups: list[Group]
) -> Iterator[Forecast]:
    """The greedy partition on groups of devices, each in the place of one device."""
    if max(map(len, groups)) > pipelining.microbatches:
        return
    try:
        plan = partition(profile, grouped(cluster, groups), len(groups), pipelining)
    except PlanError:
        return
    yield from _foreseen(ungrouped(plan, profile, cluster, groups), profile, cluster)


def _grown(profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int) -> Iterator[Forecast]:
    """From a pipeline of single devices: each further device goes to the busiest stage, then all is cut anew.

    Of the devices left the fastest goes first. The cuts may move, and stages change places.
    """
    try:
        plan = partition(profile, cluster, stages, pipelining)
    except PlanError:
        return
    left = sorted(
        (device for device in cluster.devices if device.name not in plan.ranks),
        key=lambda device: -device.speed,
    )
    for device in left:
        busiest = max(range(stages), key=lambda stage: plan.stages[stage].cost.total_s)
        placement = plan.placement(profile)
        devices, places = placement[busiest]
        placement[busiest] = ((*devices, device.name), places)
        plan = Plan.of(profile, cluster, placement, pipelining, "hybrid")
        yield from _foreseen(plan, profile, cluster)
        yield from _cut(profile, cluster, pipelining, [stage.devices for stage in plan.stages])


def _foreseen(plan: Plan, profile: Profile, cluster: Cluster) -> Iterator[Forecast]:
    """The plan's forecast; none where a replica gets no micro-batch."""
    try:
        yield forecast(plan, profile, cluster)
    except HvpipeError:
        return


def _counts(most: int) -> list[int]:
    """Numbers to try, 1 to `most`: of many, the powers of 2 and the last."""
    if most <= _FEW:
        return list(range(1, most + 1))
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _missing(missing: dict[str, int]) -> str:
    worst = max(missing, key=lambda name: missing[name])
    return f"lacks memory on {len(missing)} devices; on {worst} {amount(missing[worst])}"


MODES: dict[str, Callable[[Profile, Cluster, Pipelining, int | None], Iterator[Forecast]]] = {
    "data": _data,
    "pipeline": _pipelines,
    "hybrid": _hybrids,
}
"""How a cluster can be used."""
