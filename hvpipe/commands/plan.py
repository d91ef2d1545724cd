"""The body of `hvpipe plan`: makes the plan that was asked for, and those to compare it with."""

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
"""A random baseline is the median of so many, or of fewer where few fit."""


@dataclass(frozen=True)
class Question:
    """What is asked: a model, a cluster, and how to plan.

    `mode` is one of MODES or "auto"; `method` makes the pipeline; without `stages` the best number is looked
    for. `seed` is for the random methods. A step has so many `samples`: else as many as the micro-batches, if
    all are as large as the profile's.
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
class Answer:
    """The chosen plan's forecast, those of the modes it was chosen from, and of the baselines by name.

    A baseline that does not fit the devices is None. `fitting` is the number of plans found that fit: of
    these, at most DRAWS, a random baseline is the median.
    """

    question: Question
    chosen: Forecast
    candidates: tuple[Candidate, ...]
    baselines: dict[str, Forecast | None]
    fitting: dict[str, int]


def read_profile(
    path: str, microbatches: int, batch_size: int | None = None, graph_batch_size: int | None = None
) -> Profile:
    """The profile of one micro-batch: of a step of `batch_size` samples where that is given.

    Where the micro-batches do not divide the samples, it is that of the largest. `graph_batch_size` is how
    many samples the costs of a PipeDream graph (.txt) are of, which it does not say itself: else 1.
    """
    if Path(path).suffix == ".txt":
        profile = read_pipedream(path, batch_size=1 if graph_batch_size is None else graph_batch_size)
    elif graph_batch_size is not None:
        raise HvpipeError(
            "--graph-batch-size is for a PipeDream graph (.txt); a profile knows its batch. "
            f"Received: {path!r}"
        )
    else:
        profile = Profile.read(path)
    if batch_size is None:
        return profile
    if batch_size < microbatches:
        raise HvpipeError(
            "A batch should have at least a sample for each micro-batch. "
            f"Received: batch_size={batch_size}, microbatches={microbatches}"
        )
    return profile.at_batch(math.ceil(batch_size / microbatches))


def answer(question: Question, *, with_baselines: bool = True) -> Answer:
    """Plan, and foretell the step; PlanError where memory does not suffice, HvpipeError for bad input."""
    _check(question)
    profile, cluster, pipelining = question.profile, question.cluster, question.pipelining
    stages, samples = question.stages, question.samples
    found: tuple[Candidate, ...] = ()
    if question.method != "greedy":
        chosen = _by_method(question).check_memory(cluster)
    else:
        if question.mode == "auto":
            found = tuple(candidates(profile, cluster, pipelining, stages, samples))
        else:
            found = (candidate(question.mode, profile, cluster, pipelining, stages, samples),)
        chosen = _best(found, question)
    others: dict[str, Forecast | None] = {}
    fitting: dict[str, int] = {}
    if with_baselines:
        if chosen.plan.method != "greedy":
            others["greedy"] = candidate("pipeline", profile, cluster, pipelining, stages).forecast
        for name in BASELINES:
            if name != question.method:
                others[name], fitting[name] = _baseline(name, question)
    return Answer(question, chosen, found, others, fitting)


def finest(ask: Callable[[int], Question], batch_size: int) -> Question:
    """`ask(m)` for the number of micro-batches, 1, 2, 4, ..., whose plan has the shortest foreseen step.

    More of them leave a shorter bubble, and pay the fixed parts of the layers' times more often. Numbers for
    which there is no plan are passed over; where there is none at all, the last one's error is raised.
    """
    best: tuple[float, Question] | None = None
    refused: HvpipeError | None = None
    for power in range(batch_size.bit_length()):
        try:
            question = ask(2**power)
            step_s = answer(question, with_baselines=False).chosen.step_s
        except HvpipeError as error:
            refused = error
            continue
        if best is None or step_s < best[0]:
            best = step_s, question
    if best is None:
        raise refused or HvpipeError(
            f"A batch should have at least one sample. Received: batch_size={batch_size}"
        )
    return best[1]


def _check(question: Question) -> None:
    if question.mode != "auto" and question.mode not in MODES:
        raise HvpipeError(
            f"mode should be auto or one of {', '.join(MODES)}. Received: mode={question.mode!r}"
        )
    if question.method not in METHODS:
        raise HvpipeError(
            f"method should be one of {', '.join(METHODS)}. Received: method={question.method!r}"
        )
    if question.method != "greedy" and question.mode != "pipeline":
        raise HvpipeError(
            "Only a pipeline can be planned by another method than greedy. "
            f"Received: mode={question.mode!r}, method={question.method!r}"
        )
    stages, how = question.stages, question.pipelining
    if stages is not None and stages < 1:
        raise HvpipeError(f"stages should be at least 1. Received: stages={stages}")
    if stages is not None and stages > 1 and question.mode == "data":
        raise HvpipeError(
            "Data parallel has one stage: leave the stages out, or choose another mode. "
            f"Received: mode='data', stages={stages}"
        )
    if stages is not None and stages > how.microbatches * how.chunks:
        raise HvpipeError(
            "A step should have at least as many micro-batches as a pipeline has devices, or some of them "
            f"would only wait. Received: microbatches={how.microbatches}, stages={stages}"
        )


def _best(found: Sequence[Candidate], question: Question) -> Forecast:
    if found[0].forecast is not None:
        return found[0].forecast
    if question.mode == "pipeline":  # a message of its own: what is missing, and what would make it fit
        raise PlanError(found[0].refused)
    raise PlanError(
        "The model should fit the devices. Received: "
        + "; ".join(f"{one.mode}: {one.refused}" for one in found)
    )


def _all_stages(question: Question) -> int:
    """The stages of a method that takes a number: as asked for, else one (or all chunks) on every device.

    No more devices than there are micro-batches, or some would only wait.
    """
    if question.stages is not None:
        return question.stages
    chunks = question.pipelining.chunks
    devices, layers = len(question.cluster.devices), len(question.profile.layers)
    return min(devices, layers // chunks, question.pipelining.microbatches) * chunks


def _by_method(question: Question) -> Forecast:
    profile, cluster, how = question.profile, question.cluster, question.pipelining
    stages = _all_stages(question)
    if question.method == "exact":
        plan = exact(profile, cluster, stages, how)
    else:
        plan = baseline(question.method, profile, cluster, stages, how, seed=question.seed)
    return forecast(plan, profile, cluster)


def _baseline(name: str, question: Question) -> tuple[Forecast | None, int]:
    """Its forecast, the median by step where it is random, and of how many that fit it is."""
    profile, cluster = question.profile, question.cluster
    stages, how = _all_stages(question), question.pipelining
    if is_random(name):
        seeds = range(question.seed, question.seed + DRAWS)
        plans = random_plans(name, profile, cluster, stages, how, seeds)
    else:
        plans = [baseline(name, profile, cluster, stages, how)]
    forecasts = [forecast(plan, profile, cluster) for plan in plans]
    found = sorted((one for one in forecasts if not one.shortages(cluster)), key=lambda one: one.step_s)
    return found[(len(found) - 1) // 2] if found else None, len(found)
