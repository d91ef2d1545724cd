"""Chooses between data parallel, pipeline and hybrid for a model and a cluster, by the simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.plan.greedy import check_stages, fitting, partition
from hvpipe.plan.memory_shortage import amount
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.replication import Group, grouped, groupings, ungrouped
from hvpipe.plan.span_costs import Spans
from hvpipe.plan.stage_plan import Plan
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

# With more devices than `_FEW`, not every number of stages is tried, and only `_GROWING` hybrids grow.
_FEW, _GROWING = 8, 2

_LACKS = "lacks memory for stages on several devices"


@dataclass(frozen=True)
class Candidate:
    """The best plan found for one mode.

    Args:
        mode: "data", "pipeline" or "hybrid".
        forecast: The forecast of the best plan; None if no plan fits.
        refused: Why no plan fits; empty if one does.
    """

    mode: str
    forecast: Forecast | None
    refused: str = ""


def candidates(
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining,
    stages: int | None = None,
    samples: int | None = None,
) -> list[Candidate]:
    """Find the best plan of every mode: data parallel, pipeline, hybrid.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        pipelining: Schedule and micro-batches of a step, in every mode.
        stages: Number of stages of pipelines and hybrids; None to search for the best.
        samples: Samples of a step, for data parallel, if the last micro-batch is smaller than the profile's;
            None if all micro-batches are equal.

    Returns:
        One candidate per mode, the fastest first; modes that do not fit come last.

    Raises:
        HvpipeError: If `stages` is out of range.

    Example:
        ```python
        for one in candidates(profile, cluster, Pipelining(microbatches=16)):
            print(one.mode, one.forecast.step_s if one.forecast else one.refused)
        ```
    """
    found = [candidate(mode, profile, cluster, pipelining, stages, samples) for mode in MODES]
    return sorted(found, key=lambda one: one.forecast.step_s if one.forecast else float("inf"))


def candidate(
    mode: str,
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining,
    stages: int | None = None,
    samples: int | None = None,
) -> Candidate:
    """Find the best plan of one mode; arguments as for `candidates`."""
    if mode not in MODES:
        raise HvpipeError(f"mode should be one of {', '.join(MODES)}. Received: mode={mode!r}")
    best: Forecast | None = None
    refused = ""
    try:
        for tried in MODES[mode](profile, cluster, pipelining, stages, samples):
            if missing := tried.shortages(cluster):
                refused = refused or _missing(missing)
            elif best is None or tried.step_s < best.step_s * (1 - 1e-9):
                best = tried
    except PlanError as error:
        refused = refused or str(error)
    return Candidate(mode, best, "" if best else refused or "no way found to give a stage several devices")


def choose(profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None = None) -> Forecast:
    """Choose between data parallel, pipeline and hybrid by the forecast step.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        pipelining: Schedule and micro-batches of a step, in every mode.
        stages: Number of stages of pipelines and hybrids; None to search for the best.

    Returns:
        The forecast of the fastest plan; its `plan` says what to run.

    Raises:
        PlanError: If no mode fits; the message says what each lacks.

    Example:
        ```python
        best = choose(profile, cluster, Pipelining("1f1b", microbatches=16))
        best.plan.write("plan.json")
        ```
    """
    found = candidates(profile, cluster, pipelining, stages)
    if found[0].forecast is None:
        raise PlanError(
            "The model should fit the devices in some mode. Received: "
            + "; ".join(f"{one.mode}: {one.refused}" for one in found)
        )
    return found[0].forecast


def _data(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None, samples: int | None
) -> Iterator[Forecast]:
    """Run each share at once; or in micro-batches, which stash less but divide the batch less finely."""
    yield forecast_data_parallel(profile, cluster, pipelining, samples)
    if pipelining.chunks == 1:
        everywhere = tuple(device.name for device in cluster.devices)
        placement = [(everywhere, range(len(profile.layers)))]
        one = _try_forecast(Plan.of(profile, cluster, placement, pipelining, "data"), profile, cluster)
        if isinstance(one, str):
            raise PlanError(one)
        yield one


def _pipelines(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None, samples: int | None
) -> Iterator[Forecast]:
    """Cut greedily for each number of stages, or for those that `_next_count` picks.

    If none fits, PlanError says why for the largest number.
    """
    chunks = pipelining.chunks
    most = min(len(cluster.devices), len(profile.layers) // chunks, pipelining.microbatches)
    if stages is None and most == 0:
        raise PlanError(
            "An interleaved pipeline should have a layer for each chunk. "
            f"Received: layers={len(profile.layers)}, chunks={chunks}"
        )
    spans = Spans(profile)
    steps_s: dict[int, float] = {}
    while stages is None and (count := _next_count(steps_s, most, cluster)):
        steps_s[count] = math.inf
        if count * chunks < pipelining.least_stages:
            continue
        plan = fitting(profile, cluster, count * chunks, pipelining, spans)
        if plan is None:
            continue
        one = forecast(plan, profile, cluster)
        if not one.shortages(cluster):
            steps_s[count] = one.step_s
            yield one
    if all(map(math.isinf, steps_s.values())):
        last = partition(profile, cluster, most * chunks if stages is None else stages, pipelining)
        yield forecast(last, profile, cluster).check_memory(cluster)


def _next_count(steps_s: dict[int, float], most: int, cluster: Cluster) -> int:
    """Return the number of devices to try next, up to `most`, given the steps known so far; 0 for no more.

    It first tries the numbers of `_counts`, and numbers that leave out only devices slower by a tenth or
    more. Then it bisects between the best number and its tried neighbours. If nothing fits, it tries every
    number.
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
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int | None, samples: int | None
) -> Iterator[Forecast]:
    """Give stages replicas; if that is impossible, PlanError says why."""
    if pipelining.chunks > 1:
        raise PlanError("A stage with replicas needs a schedule without chunks.")
    if pipelining.microbatches < 2:
        raise PlanError("Each replica of a stage should get a micro-batch. Received: microbatches=1")
    if stages is None:
        devices = len(cluster.devices)
        most = min(devices, len(profile.layers), pipelining.microbatches)
        counts = [count for count in _hybrid_counts(devices, most) if count >= pipelining.least_stages]
    else:
        check_stages(profile, cluster, stages, pipelining)
        counts = [stages]
    refused = []
    for tried in _layouts(profile, cluster, pipelining, counts):
        if isinstance(tried, Forecast):
            yield tried
        else:
            refused.append(tried)
    if refused:
        raise PlanError(_LACKS if _LACKS in refused else refused[0])


def _layouts(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, counts: Sequence[int]
) -> Iterator[Forecast | str]:
    """Try whole pipelines side by side for each number of stages; then pipelines that grow device by device.

    With many numbers, only the best grow, and those with too many stages for two whole pipelines.
    """
    steps_s = dict.fromkeys(counts, math.inf)
    for count in counts:
        for groups in groupings(cluster, count):
            tried = _cut(profile, cluster, pipelining, groups)
            if isinstance(tried, Forecast) and not tried.shortages(cluster):
                steps_s[count] = min(steps_s[count], tried.step_s)
            yield tried
    devices = len(cluster.devices)
    growing = [count for count in counts if count < devices]
    if max(counts, default=0) > _FEW:
        best = sorted(growing, key=lambda count: (steps_s[count], -count))[:_GROWING]
        growing = [count for count in growing if count in best or 2 * count > devices]
    for count in growing:
        yield from _grown(profile, cluster, pipelining, count)


def _cut(profile: Profile, cluster: Cluster, pipelining: Pipelining, groups: list[Group]) -> Forecast | str:
    """Cut greedily on groups of devices, each as one device; return the forecast, or why it failed."""
    largest = max(map(len, groups))
    if largest > pipelining.microbatches:
        return f"{largest} devices of a stage need {largest} micro-batches, not {pipelining.microbatches}"
    plan = fitting(profile, grouped(cluster, groups), len(groups), pipelining)
    if plan is None:
        return _LACKS
    return _try_forecast(ungrouped(plan, profile, cluster, groups), profile, cluster)


def _grown(
    profile: Profile, cluster: Cluster, pipelining: Pipelining, stages: int
) -> Iterator[Forecast | str]:
    """Grow a pipeline of single devices: each further device joins the busiest stage, then recut all stages.

    The fastest remaining device goes first. Cuts may move, and stages may swap their devices.
    """
    plan = fitting(profile, cluster, stages, pipelining)
    if plan is None:
        yield _LACKS
        return
    left = sorted(
        (device for device in cluster.devices if device.name not in plan.ranks),
        key=lambda device: -device.speed,
    )
    for device in left:
        times_s = [stage.cost.total_s for stage in plan.stages]
        busiest = times_s.index(max(times_s))
        placement = plan.placement(profile)
        devices, places = placement[busiest]
        placement[busiest] = ((*devices, device.name), places)
        plan = Plan.of(profile, cluster, placement, pipelining, "hybrid")
        yield _try_forecast(plan, profile, cluster)
        yield _cut(profile, cluster, pipelining, [stage.devices for stage in plan.stages])


def _try_forecast(plan: Plan, profile: Profile, cluster: Cluster) -> Forecast | str:
    """Return the plan's forecast, or why it failed: a replica gets no micro-batch."""
    try:
        return forecast(plan, profile, cluster)
    except HvpipeError as error:
        return str(error)


def _counts(most: int) -> list[int]:
    """Return the numbers to try from 1 to `most`; if they are many, the powers of 2 and `most`."""
    if most <= _FEW:
        return list(range(1, most + 1))
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _hybrid_counts(devices: int, most: int) -> list[int]:
    """Return the numbers of stages to try, 2 to `most`: `_counts`, and those that leave few devices idle."""
    even = {devices // replicas for replicas in range(2, devices // 2 + 1)}
    return sorted(count for count in {*even, *_counts(most)} if 2 <= count <= most)


def _missing(missing: dict[str, int]) -> str:
    """Say how many devices lack memory, and which lacks most."""
    worst = max(missing, key=lambda name: missing[name])
    return f"lacks memory on {len(missing)} devices; on {worst} {amount(missing[worst])}"


MODES: dict[str, Callable[[Profile, Cluster, Pipelining, int | None, int | None], Iterator[Forecast]]] = {
    "data": _data,
    "pipeline": _pipelines,
    "hybrid": _hybrids,
}
"""The modes, which are the ways to use a cluster, each with the function that yields its forecasts."""
