"""Makes the plan for a call of `hvpipe plan`, and the baselines to compare it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from hvpipe.errors import HvpipeError, PlanError
from hvpipe.forecast.pipeline import Forecast, forecast
from hvpipe.plan.baselines import BASELINES, baseline, is_random, random_plans
from hvpipe.plan.exact import exact
from hvpipe.plan.greedy import check_stages, fitting, partition
from hvpipe.plan.pipelining import Pipelining
from hvpipe.plan.stage_plan import Plan
from hvpipe.search.choice import MODES, Candidate, find
from hvpipe.search.judge import MANY_DEVICES
from hvpipe.search.options import PipeliningChoice
from hvpipe.search.search import BUDGET
from hvpipe.specs.cluster import Cluster
from hvpipe.specs.profile import Profile, read_pipedream

SEARCH = "search"
METHODS = (SEARCH, "greedy", "exact", *BASELINES)
MOST_COMPARED = 5000
"""With more micro-batches times stages, only quick baselines are shown; with ten times as many, none."""

MOST_LAYERS = 1000
"""With more layers, only quick baselines are shown: random ones cost hundreds of plans."""

MOST_SAMPLES = 10**9
"""The most samples of a batch."""

MOST_MICROBATCHES, MOST_TRIED = 1 << 14, 1 << 10
"""The most micro-batches of a step, whose simulation takes some 0.1 s for each device, and the most that
`--microbatches auto` tries."""

_COMPARED, _QUICK_PART = 3, 4
"""With many devices: how many numbers `--microbatches auto` plans, and with which part of the work."""

_WHOLE_SEARCHES = 3
"""If no number of micro-batches has a plan: how many are searched again, with all the work."""

DRAWS = 100
"""The number of random plans whose median a random baseline is; fewer if some do not fit."""


@dataclass(frozen=True)
class PlanRequest:
    """A model, a cluster, and how to plan.

    Attributes:
        profile: The costs of one micro-batch.
        cluster: The devices and links.
        pipelining: The schedule, micro-batches, recomputation and chunks, or what is open of it.
        stages: The number of stages; None for the fastest.
        mode: One of MODES, or "auto".
        method: One of METHODS, which makes the pipeline.
        seed: For the random methods.
        samples: Samples per step; None for full micro-batches.
    """

    profile: Profile
    cluster: Cluster
    pipelining: Pipelining | PipeliningChoice
    stages: int | None = None
    mode: str = "auto"
    method: str = SEARCH
    seed: int = 0
    samples: int | None = None

    @property
    def choice(self) -> PipeliningChoice:
        """What is fixed of the pipelining, and what is open."""
        return PipeliningChoice.of(self.pipelining)


@dataclass(frozen=True)
class PlanResult:
    """The forecast of the chosen plan, and the forecasts to compare it with.

    Attributes:
        request: The user's request.
        chosen: The forecast of the chosen plan.
        candidates: The plans of the modes that it was chosen from.
        baselines: The forecast of each baseline by name; None if it has no plan that fits.
        fitting: How many plans of each baseline fit. A random baseline is their median.
        refused: Why a baseline has no plan.
    """

    request: PlanRequest
    chosen: Forecast
    candidates: tuple[Candidate, ...]
    baselines: dict[str, Forecast | None]
    fitting: dict[str, int]
    refused: dict[str, str]


def read_profile(path: str, graph_batch_size: int | None = None) -> Profile:
    """Read a profile.

    Args:
        path: A profile in JSON, or a PipeDream graph (.txt).
        graph_batch_size: The number of samples that the costs of a PipeDream graph are for, because the file
            does not say it; 1 if not given.

    Raises:
        HvpipeError: If the file cannot be read, or states its batch size.
    """
    if Path(path).suffix == ".txt":
        return read_pipedream(path, batch_size=1 if graph_batch_size is None else graph_batch_size)
    if graph_batch_size is not None:
        raise HvpipeError(
            "--graph-batch-size is for a PipeDream graph (.txt); a profile states its batch size. "
            f"Received: {path!r}"
        )
    return Profile.read(path)


def of_microbatch(profile: Profile, microbatches: int, batch_size: int | None) -> Profile:
    """Return the profile of one micro-batch, the largest of a step of `batch_size` samples.

    Without a batch size, a profile is for one.

    Raises:
        HvpipeError: If the numbers contradict each other.
    """
    if batch_size is None:
        return profile
    if batch_size > MOST_SAMPLES:
        raise HvpipeError(f"A batch should have at most {MOST_SAMPLES:,} samples. Received: {batch_size}")
    if batch_size < microbatches:
        raise HvpipeError(
            "A batch should have at least one sample per micro-batch. "
            f"Received: batch_size={batch_size}, microbatches={microbatches}"
        )
    return profile.at_batch(math.ceil(batch_size / microbatches))


def make_plan(request: PlanRequest, *, with_baselines: bool = True, budget: int = BUDGET) -> PlanResult:
    """Make the plan and forecast its step.

    Raises:
        PlanError: If the model does not fit the devices.
        HvpipeError: If the request contradicts itself.
    """
    _check(request)
    found: tuple[Candidate, ...] = ()
    if request.method == SEARCH:
        searched = find(
            request.profile,
            request.cluster,
            request.choice,
            request.stages,
            request.samples,
            _modes(request),
            budget,
        )
        found, chosen = tuple(searched), _best(searched, request, budget)
    else:
        chosen = _by_method(request, budget)
    others: dict[str, Forecast | None] = {}
    fitting: dict[str, int] = {}
    refused: dict[str, str] = {}
    if with_baselines:
        shown = replace(request, pipelining=_for_baselines(request, chosen))
        stages = max(len(chosen.plan.stages), _all_stages(shown))
        work = stages * chosen.plan.pipelining.microbatches
        few = () if work > 10 * MOST_COMPARED else ("even", "pipedream", "m_topo")
        small = (
            work <= MOST_COMPARED
            and len(request.cluster.devices) <= MANY_DEVICES
            and len(request.profile.layers) <= MOST_LAYERS
        )
        names = ("greedy", *BASELINES) if small else few
        for name in names:
            if name != request.method:
                try:
                    others[name], fitting[name] = _baseline(name, shown)
                except HvpipeError as error:
                    others[name], fitting[name], refused[name] = None, 0, str(error)
    result = PlanResult(request, chosen, found, others, fitting, refused)
    return _with_the_fastest(result) if request.method == SEARCH else result


def _for_baselines(request: PlanRequest, chosen: Forecast) -> Pipelining:
    """Return the pipelining of the baselines: the chosen schedule, and the recomputation asked for."""
    how = chosen.plan.pipelining
    return Pipelining(how.schedule, how.microbatches, request.choice.fixed_recompute, how.chunks)


def _with_the_fastest(result: PlanResult) -> PlanResult:
    """Return the result with the fastest plan as its choice, and without figures of a faster baseline.

    A faster baseline becomes the choice if it is a pipeline, and as asked for. Otherwise it is left out.
    """
    chosen, baselines = result.chosen, dict(result.baselines)
    for name, one in result.baselines.items():
        if one is None or one.step_s >= chosen.step_s:
            continue
        if _answers(one.plan, result.request):
            chosen = one
        else:
            del baselines[name]
    return replace(result, chosen=chosen, baselines=baselines)


def _answers(plan: Plan, request: PlanRequest) -> bool:
    """Tell whether a plan is a pipeline with the stages, schedule and recomputation asked for."""
    how, choice = plan.pipelining, request.choice
    return (
        plan.contiguous
        and request.mode in ("auto", "pipeline")
        and request.stages in (None, len(plan.stages))
        and choice.schedule in ("auto", how.schedule)
        and how.least_stages <= len(plan.stages)
    )


def best_microbatches(
    request_with: Callable[[int], PlanRequest], batch_size: int, budget: int = BUDGET
) -> PlanRequest:
    """Choose the number of micro-batches with the shortest forecast step, of about 1, 2, 4, ... and all.

    More micro-batches shorten the bubble, but pay the fixed part of each layer's time more often. A divisor
    of the batch fills the last one. A number without a plan is skipped. At most MOST_TRIED are tried.

    Args:
        request_with: Makes the request for a number of micro-batches.
        batch_size: Samples per step.
        budget: The work of all searches together, as `Judge` counts it; if they find nothing, of another one.

    Returns:
        The request with the best number.

    Raises:
        HvpipeError: If the batch has no sample, or no number has a plan; it is the error for the last number.
    """
    if batch_size < 1:
        raise HvpipeError(f"A batch should have at least one sample. Received: batch_size={batch_size}")
    counts = counts_to_try(batch_size)
    best: tuple[float, PlanRequest] | None = None
    refused: HvpipeError | None = None
    first = request_with(1)
    if len(first.cluster.devices) > MANY_DEVICES and first.method == SEARCH:
        return _best_of_many(request_with, _promising(first, counts), budget)
    for count in counts:
        best, refused = _better(best, request_with, count, budget // len(counts))
    if best is None and isinstance(refused, PlanError):
        # A part of the work may not find a plan that fits. The smallest micro-batches need least memory.
        for count in counts[::-1][:_WHOLE_SEARCHES]:
            shortest_s = math.inf if best is None else best[0]
            best, refused = _better(best, request_with, count, budget)
            if best is None or best[0] >= shortest_s:
                break
    if best is None:
        assert refused is not None
        raise refused
    return best[1]


def _promising(first: PlanRequest, counts: Sequence[int]) -> list[int]:
    """Return the numbers of micro-batches for many devices, those with the shortest estimated step first.

    The estimate has equal stages and replicas, no transfers, and at least the stages that the weights need to
    fit.
    """
    devices, layers = first.cluster.devices, len(first.profile.layers)
    samples = first.profile.batch_size  # of one micro-batch, which is the batch
    room_bytes = max(device.room_bytes for device in devices)
    whole_bytes = sum(layer.state_bytes for layer in first.profile.layers)
    least = whole_bytes / room_bytes if room_bytes else math.inf

    def estimate_s(count: int) -> float:
        whole_s: float = first.profile.at_batch(math.ceil(samples / count)).compute_s
        powers = (1 << power for power in range(min(len(devices), layers, count).bit_length()))
        stages = [power for power in powers if power >= least]
        rounds = ((math.ceil(count / (len(devices) // s)) + s - 1) / s for s in stages)
        return whole_s * min(rounds, default=math.inf)

    return sorted(counts, key=lambda count: (estimate_s(count), count))


def _best_of_many(
    request_with: Callable[[int], PlanRequest], counts: Sequence[int], budget: int
) -> PlanRequest:
    """Return the request with the best of the first numbers of micro-batches, by plans with less work."""
    best: tuple[float, PlanRequest] | None = None
    for count in counts[:_COMPARED]:
        best, _ = _better(best, request_with, count, budget // _QUICK_PART)
    return _first_with_a_plan(request_with, counts, budget) if best is None else best[1]


def _first_with_a_plan(
    request_with: Callable[[int], PlanRequest], counts: Sequence[int], budget: int
) -> PlanRequest:
    """Return the request with the first of these numbers of micro-batches that has a plan."""
    refused: HvpipeError | None = None
    for count, part in product(counts[:_WHOLE_SEARCHES], (budget // 8, budget)):
        best, refused = _better(None, request_with, count, part)
        if best is not None:
            return best[1]
    assert refused is not None
    raise refused


def _better(
    best: tuple[float, PlanRequest] | None,
    request_with: Callable[[int], PlanRequest],
    count: int,
    budget: int,
) -> tuple[tuple[float, PlanRequest] | None, HvpipeError | None]:
    """Return the best step with its request, after a number of micro-batches; and why that has no plan."""
    try:
        request = request_with(count)
        step_s = make_plan(request, with_baselines=False, budget=budget).chosen.step_s
    except HvpipeError as error:
        return best, error
    return ((step_s, request) if best is None or step_s < best[0] else best), None


def counts_to_try(batch_size: int) -> list[int]:
    """Return each power of 2, or the divisor of the batch that is closer to it than to the next power."""
    most = min(batch_size, MOST_TRIED)
    divisors = [count for count in range(1, most + 1) if batch_size % count == 0]
    found = set(divisors[-1:])
    for power in range(most.bit_length()):
        nearest = min(divisors, key=lambda count: abs(math.log2(count) - power))
        found.add(nearest if abs(math.log2(nearest) - power) <= 0.5 else 2**power)
    return sorted(found)


def _check(request: PlanRequest) -> None:
    if request.mode != "auto" and request.mode not in MODES:
        raise HvpipeError(
            f"mode should be auto or one of {', '.join(MODES)}. Received: mode={request.mode!r}"
        )
    if request.method not in METHODS:
        raise HvpipeError(
            f"method should be one of {', '.join(METHODS)}. Received: method={request.method!r}"
        )
    if request.method != SEARCH and request.mode not in ("auto", "pipeline"):
        raise HvpipeError(
            f"Methods other than {SEARCH} plan pipelines only (--mode pipeline). "
            f"Received: mode={request.mode!r}, method={request.method!r}"
        )
    stages, choice = request.stages, request.choice
    if choice.microbatches > MOST_MICROBATCHES:
        raise HvpipeError(
            f"A step should have at most {MOST_MICROBATCHES:,} micro-batches. "
            f"Received: microbatches={choice.microbatches}"
        )
    layers = len(request.profile.layers)
    if choice.schedule == "interleaved":
        check_chunks(choice.chunks, layers)
    if isinstance(choice.recompute, tuple) and max(choice.recompute, default=0) >= layers:
        raise HvpipeError(
            "The stages to recompute should be below the number of layers. "
            f"Received: stage {max(choice.recompute)}, layers={layers}"
        )
    if stages is not None and stages < 1:
        raise HvpipeError(f"stages should be at least 1. Received: stages={stages}")
    if stages is not None and stages > 1 and request.mode == "data":
        raise HvpipeError(
            "Data parallel has one stage: omit the stages, or choose another mode. "
            f"Received: mode='data', stages={stages}"
        )
    if stages == 1 and request.mode == "hybrid":
        raise HvpipeError(
            "A hybrid has two stages or more: omit the stages, or choose mode data. "
            "Received: mode='hybrid', stages=1"
        )


def check_chunks(chunks: int, layers: int) -> None:
    """Refuse more chunks than layers: no interleaved schedule has them."""
    if chunks > layers:
        raise HvpipeError(
            "An interleaved schedule should have a layer for each chunk. "
            f"Received: chunks={chunks}, layers={layers}"
        )


def _best(found: Sequence[Candidate], request: PlanRequest, budget: int) -> Forecast:
    if found[0].forecast is not None:
        return found[0].forecast
    refusals = {one.mode: one.refused for one in found}
    if request.mode == "pipeline":  # its message says what is missing, and what would make it fit
        raise PlanError(refusals["pipeline"])
    if request.mode == "auto":
        pipeline = refusals["pipeline"].removesuffix(".")
        raise PlanError(f"{pipeline}. Nor does it fit in the modes data and hybrid.")
    raise PlanError(
        f"The model should fit the devices. Received: {request.mode}: "
        f"{refusals[request.mode].removesuffix('.')}. {_other_way(request, budget)}"
    )


def _other_way(request: PlanRequest, budget: int) -> str:
    """Say which mode or method has a plan that fits; or if none, what a pipeline lacks."""
    modes = [mode for mode in _modes(replace(request, mode="auto")) if mode != request.mode]
    found = find(
        request.profile,
        request.cluster,
        request.choice,
        request.stages,
        request.samples,
        modes,
        max(1, budget // 4),
    )
    mode = "pipeline" if found[0].forecast is None else found[0].mode
    flags = f"--mode {mode}" if request.method == SEARCH else f"--method {SEARCH} --mode {mode}"
    if found[0].forecast is not None:
        return f"It would fit with {flags}."
    refused = next(one.refused for one in found if one.mode == "pipeline")
    return f"Nor does it fit with {flags}: {refused}"


def _modes(request: PlanRequest) -> Sequence[str]:
    """Return the modes to search."""
    if request.mode != "auto":
        return (request.mode,)
    several = request.stages is not None and request.stages > 1
    return MODES[1:] if several else MODES  # the first mode, data parallel, has one stage


def _all_stages(request: PlanRequest) -> int:
    """Return the number of stages for a method that needs one.

    By default every device gets one stage, or all its chunks. The pipeline uses no more devices than there
    are micro-batches, because the others would only wait.
    """
    if request.stages is not None:
        return request.stages
    how = request.choice.usual
    devices, layers = len(request.cluster.devices), len(request.profile.layers)
    return min(devices, layers // how.chunks, how.microbatches) * how.chunks


def _by_method(request: PlanRequest, budget: int) -> Forecast:
    """Return the forecast of the plan by a method other than the search."""
    how = request.choice.usual
    try:
        found = _made_by_method(request).check_memory(request.cluster)
    except PlanError as error:
        message = str(error)
        if "memory" in message and "It would fit" not in message:
            message = f"{message.removesuffix('.')}. {_other_way(request, budget)}"
        raise PlanError(message) from error
    if how.least_stages > len(found.plan.stages):
        raise PlanError(
            "The stages to recompute should be stages of the plan: choose others, or another method. "
            f"Received: recompute={how.recompute}, method={request.method!r}, "
            f"which makes stages={len(found.plan.stages)}"
        )
    return found


def _made_by_method(request: PlanRequest) -> Forecast:
    profile, cluster, how = request.profile, request.cluster, request.choice.usual
    if request.method == "greedy":
        plan = partition(profile, cluster, request.stages, how)
    elif request.method == "exact":
        plan = exact(profile, cluster, _all_stages(request), how)
    else:
        plan = baseline(request.method, profile, cluster, _all_stages(request), how, seed=request.seed)
    return forecast(plan, profile, cluster)


def _baseline(name: str, request: PlanRequest) -> tuple[Forecast, int]:
    """Return a baseline's forecast (a random one's median by step time), and how many of its plans fit.

    Raises:
        HvpipeError: If it has no plan that fits.
    """
    profile, cluster = request.profile, request.cluster
    stages, how = _all_stages(request), request.choice.usual
    if name == "greedy":
        check_stages(profile, cluster, stages, how)
        plans = [plan for plan in [fitting(profile, cluster, stages, how)] if plan is not None]
    elif is_random(name):
        seeds = range(request.seed, request.seed + DRAWS)
        plans = random_plans(name, profile, cluster, stages, how, seeds)
    else:
        plans = [baseline(name, profile, cluster, stages, how)]
    forecasts = [forecast(plan, profile, cluster) for plan in plans]
    found = sorted((one for one in forecasts if not one.shortages(cluster)), key=lambda one: one.step_s)
    if not found:
        raise PlanError("lacks memory")
    return found[(len(found) - 1) // 2], len(found)
