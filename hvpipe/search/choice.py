"""Chooses between data parallel, pipeline and hybrid for a model and a cluster, by the simulated step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.data_parallel import forecast_data_parallel
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.plan.greedy import check_stages, partition
from hvpipe.plan.memory_shortage import amount
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.search.data_devices import data_devices
from hvpipe.search.judge import MANY_DEVICES, Judge, Judged
from hvpipe.search.layout import StageLayout
from hvpipe.search.options import AUTO, PipeliningChoice
from hvpipe.search.search import BUDGET, faster_halves, search
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile

MODES = ("data", "pipeline", "hybrid")
"""The modes, which are the ways to use a cluster."""

METHODS = {"data": "hybrid", "pipeline": "search", "hybrid": "hybrid"}
"""The method of a plan that the search found, by its mode."""


@dataclass(frozen=True)
class Candidate:
    """The best plan found for one mode.

    Args:
        mode: "data", "pipeline" or "hybrid".
        forecast: The forecast of the best plan; None if no plan fits.
        refused: Why no plan fits; empty if one does.

    Example:
        ```python
        for each in candidates(profile, cluster):
            print(each.mode, each.refused or each.forecast.step_s)
        ```
    """

    mode: str
    forecast: Forecast | None
    refused: str = ""


def candidates(
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining | PipeliningChoice = AUTO,
    stages: int | None = None,
    samples: int | None = None,
) -> list[Candidate]:
    """Find the best plan of every mode: data parallel, pipeline, hybrid.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        pipelining: Schedule, micro-batches and recomputation; a PipeliningChoice leaves some of it open.
        stages: Number of stages of pipelines and hybrids; None to search for the best.
        samples: Samples of a step, for data parallel, if the last micro-batch is smaller than the profile's;
            None if all micro-batches are equal.

    Returns:
        One candidate per mode, the fastest first; modes that do not fit come last.

    Raises:
        HvpipeError: If `stages` is out of range.

    Example:
        ```python
        for one in candidates(profile, cluster, PipeliningChoice(microbatches=16)):
            print(one.mode, one.forecast.step_s if one.forecast else one.refused)
        ```
    """
    return find(profile, cluster, PipeliningChoice.of(pipelining), stages, samples)


def find(
    profile: Profile,
    cluster: Cluster,
    choice: PipeliningChoice,
    stages: int | None = None,
    samples: int | None = None,
    modes: Sequence[str] = MODES,
    budget: int = BUDGET,
) -> list[Candidate]:
    """Find the best plan of each of the modes, the fastest first; see `candidates` and `search`."""
    if wrong := [mode for mode in modes if mode not in MODES]:
        raise HvpipeError(f"mode should be one of {', '.join(MODES)}. Received: mode={wrong[0]!r}")
    pipelines = [mode for mode in modes if mode != "data"]
    if stages is not None and pipelines:
        _first_with(stages, profile, cluster, choice)
    found: dict[str, Judged] = {}
    if pipelines:
        found = search(profile, cluster, choice, stages, pipelines, budget)
    results = []
    for mode in modes:
        if mode == "data":
            results.append(_data(profile, cluster, choice, samples, found.get("data"), budget))
        elif mode in found:
            results.append(Candidate(mode, _forecast(profile, cluster, found[mode])))
        elif mode == "hybrid":
            results.append(Candidate(mode, None, _no_hybrid(profile, cluster, choice, stages)))
        elif len(cluster.devices) > MANY_DEVICES and (found or any(one.forecast for one in results)):
            # Explaining takes minutes.
            results.append(Candidate(mode, None, "lacks memory, or is far slower than the others"))
        else:
            results.append(_no_pipeline(profile, cluster, choice, stages))
    return sorted(results, key=lambda one: one.forecast.step_s if one.forecast else float("inf"))


def _first_with(stages: int, profile: Profile, cluster: Cluster, choice: PipeliningChoice) -> Pipelining:
    """Return the first schedule that may have these stages; raise the HvpipeError of the usual one."""
    refused: HvpipeError | None = None
    for schedule, chunks in choice.schedules:
        how = Pipelining(schedule, choice.microbatches, choice.fixed_recompute, chunks)
        try:
            check_stages(profile, cluster, stages, how)
        except HvpipeError as error:
            refused = refused or error
        else:
            return how
    assert refused is not None
    raise refused


def candidate(
    mode: str,
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining | PipeliningChoice,
    stages: int | None = None,
    samples: int | None = None,
) -> Candidate:
    """Find the best plan of one mode; arguments as for `candidates`."""
    return find(profile, cluster, PipeliningChoice.of(pipelining), stages, samples, (mode,))[0]


def choose(
    profile: Profile,
    cluster: Cluster,
    pipelining: Pipelining | PipeliningChoice = AUTO,
    stages: int | None = None,
) -> Forecast:
    """Choose between data parallel, pipeline and hybrid by the forecast step.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        pipelining: Schedule, micro-batches and recomputation; a PipeliningChoice leaves some of it open.
        stages: Number of stages of pipelines and hybrids; None to search for the best.

    Returns:
        The forecast of the fastest plan; its `plan` says what to run.

    Raises:
        PlanError: If no mode fits; the message says what each lacks.

    Example:
        ```python
        best = choose(profile, cluster, PipeliningChoice(microbatches=16))
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


def _forecast(profile: Profile, cluster: Cluster, judged: Judged) -> Forecast:
    layout = judged.layout
    plan = Plan.of(profile, cluster, layout.placement, judged.pipelining, METHODS[layout.mode])
    return forecast(plan, profile, cluster)


def plan_for_every_device(
    profile: Profile, cluster: Cluster, choice: PipeliningChoice, stages: int | None = None
) -> Plan:
    """Return the fastest pipeline or hybrid in which every device of the cluster has a stage.

    Args:
        profile: The model, with costs of one micro-batch.
        cluster: The devices and links.
        choice: What is fixed and what is open.
        stages: The number of stages; None to choose it.

    Raises:
        HvpipeError: If `stages` is out of range.
        PlanError: If no such plan is found.
    """
    if stages is not None:
        _first_with(stages, profile, cluster, choice)
    found = search(profile, cluster, choice, stages, every_device=True)
    if not found:
        refused = _no_pipeline(profile, cluster, choice, stages)
        raise PlanError(refused.refused or f"Every device should get a stage. Received: stages={stages}")
    best = min(found.values(), key=lambda one: one.step_s)
    return _forecast(profile, cluster, best).plan


def _data(
    profile: Profile,
    cluster: Cluster,
    choice: PipeliningChoice,
    samples: int | None,
    other: Judged | None,
    budget: int,
) -> Candidate:
    """Run each device's share in one pass; or in micro-batches, which stash less but make coarser shares.

    It tries all devices, the faster half, a quarter, and so on, and the sets that `data_devices` finds.
    """
    refusals: list[str] = []
    shortages: list[str] = []
    fitting: list[Forecast] = []
    how = Pipelining("1f1b", choice.microbatches, choice.fixed_recompute)
    judge = Judge(profile, cluster, choice, BUDGET)
    batch = profile.batch_size * choice.microbatches if samples is None else samples
    halves = [tuple(one.name for one in some.devices) for some in faster_halves(profile, cluster)]
    every = tuple(device.name for device in cluster.devices)
    found = data_devices(profile, cluster, batch, 2 if judge.many else 8, budget / BUDGET)
    for names in dict.fromkeys((every, *halves, *found)):
        try:
            whole = forecast_data_parallel(profile, cluster, how, samples, names)
            if missing := whole.shortages(cluster):
                shortages.append(_missing(missing))
            else:
                fitting.append(whole)
        except PlanError as error:
            refusals.append(str(error))
        for name, chunks in choice.schedules:
            if chunks == 1:
                judge.judge(StageLayout((names,), (len(profile.layers),), name))
    for judged in (*judge.best.values(), other):
        if judged is not None:
            fitting.append(_forecast(profile, cluster, judged))
    if not fitting:
        # Too few samples are a reason for some of the sets only: with fewer devices, each has one.
        return Candidate("data", None, (shortages or refusals)[0])
    return Candidate("data", min(fitting, key=lambda one: one.step_s))


def _no_pipeline(
    profile: Profile, cluster: Cluster, choice: PipeliningChoice, stages: int | None
) -> Candidate:
    """Say what the pipeline with the most stages lacks; or return one that the search has missed."""
    usual = choice.usual if stages is None else _first_with(stages, profile, cluster, choice)
    chunks = usual.chunks
    most = min(len(cluster.devices), len(profile.layers) // chunks, choice.microbatches)
    if stages is None and most == 0:
        return Candidate(
            "pipeline",
            None,
            "An interleaved pipeline should have a layer for each chunk. "
            f"Received: layers={len(profile.layers)}, chunks={chunks}",
        )
    again = choice.recompute == "auto" or choice.fixed_recompute
    how = replace(usual, recompute=again)
    try:
        plan = partition(profile, cluster, most * chunks if stages is None else stages, how)
        return Candidate("pipeline", forecast(plan, profile, cluster).check_memory(cluster))
    except PlanError as error:
        return Candidate("pipeline", None, str(error))


def _no_hybrid(profile: Profile, cluster: Cluster, choice: PipeliningChoice, stages: int | None) -> str:
    """Say why no stage can have several devices."""
    if all(chunks > 1 for _, chunks in choice.schedules):
        return "A stage with replicas needs a schedule without chunks."
    if choice.microbatches < 2:
        return "Each replica of a stage should get a micro-batch. Received: microbatches=1"
    limited = any(math.isfinite(device.room_bytes) for device in cluster.devices)
    if limited and len(cluster.devices) > (stages or 2) and len(profile.layers) > 1:
        return "lacks memory for stages on several devices"
    return "no way found to give a stage several devices"


def _missing(missing: dict[str, int]) -> str:
    """Say how many devices lack memory, and which lacks most."""
    worst = max(missing, key=lambda name: missing[name])
    return f"lacks memory on {len(missing)} devices; on {worst} {amount(missing[worst])}"
