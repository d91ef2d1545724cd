"""Makes the plan for a call of `hvpipe plan`, and the baselines to compare it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.choice import MODES, Candidate, candidate, candidates
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.plan.baselines import BASELINES, baseline, is_random, random_plans
from hvpipe.plan.exact import exact
from hvpipe.plan.pipelining import Pipelining
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile, read_pipedream

METHODS = ("greedy", "exact", *BASELINES)
DRAWS = 100
"""A random baseline is the median of this many random plans; of fewer if some do not fit."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, and how to plan.

    Attributes:
        profile: The costs of one micro-batch.
        cluster: The devices and links.
        pipelining: The schedule, the number of micro-batches, recomputation and chunks.
        stages: The number of stages; None for the fastest.
        mode: One of MODES, or "auto".
        method: One of METHODS, which makes the pipeline.
        seed: For the random methods.
        samples: Samples per step; None for full micro-batches.
    """

    profile: Profile
    cluster: Cluster
    pipelining: Pipelining
    stages: int | None = None
    mode: str = "pipeline"
    method: str = "greedy"
    seed: int = 0
    samples: int | None = None


@dataclass(frozen=True)
class PlanResult:
    """The forecast of the chosen plan, and the forecasts to compare it with.

    Attributes:
        request: The user's request.
        chosen: The forecast of the chosen plan.
        candidates: The plans of the modes that it was chosen from.
        baselines: The forecast of each baseline by name; None if it does not fit the devices.
        fitting: How many plans of each baseline fit. A random baseline is their median.
    """

    request: PlanRequest
    chosen: Forecast
    candidates: tuple[Candidate, ...]
    baselines: dict[str, Forecast | None]
    fitting: dict[str, int]


def read_profile(
    path: str, microbatches: int, batch_size: int | None = None, graph_batch_size: int | None = None
) -> Profile:
    """Read the profile of one micro-batch.

    Args:
        path: A profile in JSON, or a PipeDream graph (.txt).
        microbatches: Micro-batches per step.
        batch_size: Samples per step; then the profile is scaled to the largest micro-batch.
        graph_batch_size: The number of samples that the costs of a PipeDream graph are for, because the file
            does not say it; 1 if not given.

    Raises:
        HvpipeError: If the file cannot be read or the numbers contradict each other.
    """
    if Path(path).suffix == ".txt":
        profile = read_pipedream(path, batch_size=1 if graph_batch_size is None else graph_batch_size)
    elif graph_batch_size is not None:
        raise HvpipeError(
            "--graph-batch-size is for a PipeDream graph (.txt); a profile states its batch size. "
            f"Received: {path!r}"
        )
    else:
        profile = Profile.read(path)
    if batch_size is None:
        return profile
    if batch_size < microbatches:
        raise HvpipeError(
            "A batch should have at least one sample per micro-batch. "
            f"Received: batch_size={batch_size}, microbatches={microbatches}"
        )
    return profile.at_batch(math.ceil(batch_size / microbatches))


def make_plan(request: PlanRequest, *, with_baselines: bool = True) -> PlanResult:
    """Make the plan and forecast its step.

    Raises:
        PlanError: If the model does not fit the devices.
        HvpipeError: If the request contradicts itself.
    """
    _check(request)
    profile, cluster, pipelining = request.profile, request.cluster, request.pipelining
    stages, samples = request.stages, request.samples
    found: tuple[Candidate, ...] = ()
    if request.method != "greedy":
        chosen = _by_method(request).check_memory(cluster)
    else:
        if request.mode == "auto":
            found = tuple(candidates(profile, cluster, pipelining, stages, samples))
        else:
            found = (candidate(request.mode, profile, cluster, pipelining, stages, samples),)
        chosen = _best(found, request)
    others: dict[str, Forecast | None] = {}
    fitting: dict[str, int] = {}
    if with_baselines:
        if chosen.plan.method != "greedy":
            others["greedy"] = candidate("pipeline", profile, cluster, pipelining, stages).forecast
        for name in BASELINES:
            if name != request.method:
                others[name], fitting[name] = _baseline(name, request)
    return PlanResult(request, chosen, found, others, fitting)


def with_best_microbatches(request_with: Callable[[int], PlanRequest], batch_size: int) -> PlanRequest:
    """Choose the number of micro-batches, 1, 2, 4, ..., with the shortest forecast step.

    More micro-batches shorten the bubble, but pay the fixed part of each layer's time more often. A number
    without a plan is skipped.

    Args:
        request_with: Makes the request for a number of micro-batches.
        batch_size: Samples per step.

    Returns:
        The request with the best number.

    Raises:
        HvpipeError: If no number has a plan; it is the error for the last number.
    """
    best: tuple[float, PlanRequest] | None = None
    refused: HvpipeError | None = None
    for power in range(batch_size.bit_length()):
        try:
            request = request_with(2**power)
            step_s = make_plan(request, with_baselines=False).chosen.step_s
        except HvpipeError as error:
            refused = error
            continue
        if best is None or step_s < best[0]:
            best = step_s, request
    if best is None:
        raise refused or HvpipeError(
            f"A batch should have at least one sample. Received: batch_size={batch_size}"
        )
    return best[1]


def _check(request: PlanRequest) -> None:
    if request.mode != "auto" and request.mode not in MODES:
        raise HvpipeError(
            f"mode should be auto or one of {', '.join(MODES)}. Received: mode={request.mode!r}"
        )
    if request.method not in METHODS:
        raise HvpipeError(
            f"method should be one of {', '.join(METHODS)}. Received: method={request.method!r}"
        )
    if request.method != "greedy" and request.mode != "pipeline":
        raise HvpipeError(
            "Methods other than greedy plan pipelines only (--mode pipeline). "
            f"Received: mode={request.mode!r}, method={request.method!r}"
        )
    stages, how = request.stages, request.pipelining
    if stages is not None and stages < 1:
        raise HvpipeError(f"stages should be at least 1. Received: stages={stages}")
    if stages is not None and stages > 1 and request.mode == "data":
        raise HvpipeError(
            "Data parallel has one stage: omit the stages, or choose another mode. "
            f"Received: mode='data', stages={stages}"
        )
    if stages is not None and stages > how.microbatches * how.chunks:
        raise HvpipeError(
            "A step should have at least as many micro-batches as the pipeline has devices; otherwise some "
            f"devices only wait. Received: microbatches={how.microbatches}, stages={stages}"
        )


def _best(found: Sequence[Candidate], request: PlanRequest) -> Forecast:
    if found[0].forecast is not None:
        return found[0].forecast
    if request.mode == "pipeline":  # its message says what is missing, and what would make it fit
        raise PlanError(found[0].refused)
    raise PlanError(
        "The model should fit the devices. Received: "
        + "; ".join(f"{one.mode}: {one.refused}" for one in found)
    )


def _all_stages(request: PlanRequest) -> int:
    """Return the number of stages for a method that needs one.

    By default every device gets one stage, or all its chunks. The pipeline uses no more devices than there
    are micro-batches, because the others would only wait.
    """
    if request.stages is not None:
        return request.stages
    chunks = request.pipelining.chunks
    devices, layers = len(request.cluster.devices), len(request.profile.layers)
    return min(devices, layers // chunks, request.pipelining.microbatches) * chunks


def _by_method(request: PlanRequest) -> Forecast:
    profile, cluster, how = request.profile, request.cluster, request.pipelining
    stages = _all_stages(request)
    if request.method == "exact":
        plan = exact(profile, cluster, stages, how)
    else:
        plan = baseline(request.method, profile, cluster, stages, how, seed=request.seed)
    return forecast(plan, profile, cluster)


def _baseline(name: str, request: PlanRequest) -> tuple[Forecast | None, int]:
    """Return a baseline's forecast (a random one's median by step time), and how many of its plans fit."""
    profile, cluster = request.profile, request.cluster
    stages, how = _all_stages(request), request.pipelining
    if is_random(name):
        seeds = range(request.seed, request.seed + DRAWS)
        plans = random_plans(name, profile, cluster, stages, how, seeds)
    else:
        plans = [baseline(name, profile, cluster, stages, how)]
    forecasts = [forecast(plan, profile, cluster) for plan in plans]
    found = sorted((one for one in forecasts if not one.shortages(cluster)), key=lambda one: one.step_s)
    return found[(len(found) - 1) // 2] if found else None, len(found)
