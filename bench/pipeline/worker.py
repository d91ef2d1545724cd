"""What every rank of the pipeline benchmark does: profile, plan by each method, train each plan in turn."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from bench.pipeline.report import MeasuredPlan, PipelineReport
from bench.rounds.record import Task
from bench.training.prepare import prepare_tensorflow
from bench.training.workloads import WORKLOADS, endless, synthetic

METHODS = (
    *("chosen", "greedy", "even", "pipedream", "data"),
    *("round_robin", "random", "random_cuts", "m_topo", "m_etf"),
)
"""`chosen` is what the search finds for all ranks, with any schedule; `data` is one stage on all ranks."""
_SCHEDULE = "1f1b"  # of all plans but the chosen one
_PROFILED_MICROBATCHES = 8  # until the planner has chosen their number


@dataclass(frozen=True)
class WorkerOptions:
    """Which plans are trained, with so many draws of the random ones, and for how long."""

    methods: tuple[str, ...]
    seeds: int
    rounds: int
    steps: int  # of a plan in a round


def measure(task: Task, options: WorkerOptions, where: str) -> PipelineReport:
    """Profile once, then train every plan in rounds. Every rank calls this and gets the report."""
    keras = prepare_tensorflow(task.threads)
    import hvpipe

    hvpipe.init()
    tell = _say if hvpipe.rank() == 0 else lambda text: None
    build = partial(WORKLOADS[task.workload].build, keras, task.pixels)
    question = _question(build, task, options, tell)
    plans = _plans(question, options)
    pipelines = {}
    for name, plan in plans.items():
        pipelines[name] = _compiled(keras, build, plan)
        tell(f"tracing and warming up {name} ...")
        _timed_fit(keras, pipelines[name], _batches(task), 2)
    step_s = _train_in_turn(keras, pipelines, task, options, tell)
    return PipelineReport(
        f"{task.workload}, {task.pixels} px, batch {task.batch} in all, SGD",
        where,
        _SCHEDULE,
        question.pipelining.microbatches,
        hvpipe.size(),
        task.batch,
        tuple(_measured_plans(question, plans, step_s)),
    )


def _batches(task: Task) -> Any:
    """Return an endless dataset of one batch, the same on every rank."""
    import tensorflow as tf

    return endless(tf.data.Dataset.from_tensors(synthetic(task, task.batch, 0)))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _question(
    build: Callable[[], Any], task: Task, options: WorkerOptions, tell: Callable[[str], None]
) -> Any:
    """Profile model and cluster, settle the number of micro-batches, and return the planner's question."""
    import hvpipe
    import hvpipe.keras as hk
    from hvpipe.commands.plan_request import PlanRequest, best_microbatches
    from hvpipe.plan.pipelining import Pipelining

    x, y = next(iter(_batches(task)))

    def profile_of(samples: int) -> Any:
        return hk.measure(build, (x[:samples], y[:samples]), progress=False, optimizer="sgd")

    tell("profiling ...")
    samples = math.ceil(task.batch / _PROFILED_MICROBATCHES)
    measured = profile_of(samples)
    measured, cluster = hk.measure_ranks(measured)

    def ask(microbatches: int) -> PlanRequest:
        how = Pipelining(_SCHEDULE, microbatches)
        profile = measured.at_batch(math.ceil(task.batch / microbatches))
        return PlanRequest(profile, cluster, how, hvpipe.size())

    least = hvpipe.size() if "data" in options.methods else 1  # data parallel: one for each rank
    count = max(best_microbatches(ask, task.batch).pipelining.microbatches, least)
    if (chosen := math.ceil(task.batch / count)) != samples:
        tell(f"profiling micro-batches of {chosen} samples ...")
        measured, _ = hk.measure_ranks(profile_of(chosen))
    return ask(count)


def _plans(question: Any, options: WorkerOptions) -> dict[str, Any]:
    """Return a plan by each method; random methods have one for each seed, numbered in its name."""
    import hvpipe
    from hvpipe.plan.baselines import baseline
    from hvpipe.plan.greedy import partition
    from hvpipe.plan.stage_plan import Plan
    from hvpipe.search.choice import plan_for_every_device
    from hvpipe.search.options import PipeliningChoice

    profile, cluster, how = question.profile, question.cluster, question.pipelining
    ranks, m = hvpipe.size(), how.microbatches
    everywhere = tuple(device.name for device in cluster.devices)
    plans = {}
    for method in options.methods:
        for seed in range(options.seeds if method.startswith("random") else 1):
            name = f"{method} {seed}" if method.startswith("random") else method
            if method == "greedy":
                plans[name] = partition(profile, cluster, ranks, how)
            elif method == "chosen":
                plans[name] = plan_for_every_device(profile, cluster, PipeliningChoice(microbatches=m))
            elif method == "data":
                plans[name] = Plan.of(
                    profile, cluster, [(everywhere, range(len(profile.layers)))], how, method
                )
            else:
                plans[name] = baseline(method, profile, cluster, ranks, how, seed=seed)
    return plans


def _compiled(keras: Any, build: Callable[[], Any], plan: Any) -> Any:
    import hvpipe.keras as hk

    keras.utils.set_random_seed(20)
    pipeline = hk.pipeline_parallel(build, plan)
    pipeline.compile(keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
    return pipeline


def _train_in_turn(
    keras: Any,
    pipelines: dict[str, Any],
    task: Task,
    options: WorkerOptions,
    tell: Callable[[str], None],
) -> dict[str, list[float]]:
    """Train every pipeline in each round, and return the seconds of its steps on this rank.

    The first step of a round does not count, unless it is the only one.
    """
    import hvpipe

    found: dict[str, list[float]] = {name: [] for name in pipelines}
    for number in range(options.rounds):
        for name, pipeline in pipelines.items():
            hvpipe.barrier()
            step_s = _timed_fit(keras, pipeline, _batches(task), options.steps)
            found[name].extend(step_s[1:] or step_s)
            tell(f"round {number + 1} of {options.rounds}: {name} {median(step_s):.3f} s")
    return found


def _timed_fit(keras: Any, model: Any, data: Any, steps: int) -> list[float]:
    """Train some steps, and return the seconds of each."""
    marks_s: list[float] = []

    class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not marks_s:
                marks_s.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            marks_s.append(time.perf_counter())

    model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False, callbacks=[StepTimer()])
    return [after - before for before, after in pairwise(marks_s)]


def _measured_plans(
    question: Any, plans: dict[str, Any], step_s: dict[str, list[float]]
) -> Iterator[MeasuredPlan]:
    """Gather what all ranks measured, and put the simulation and the bound beside it."""
    import hvpipe
    from hvpipe.forecast.lower_bound import lower_bound_s
    from hvpipe.forecast.pipeline import forecast
    from hvpipe.forecast.plan_costs import costs_of, dataflow_of
    from hvpipe.schedule.plan_schedule import schedule_of

    profile, cluster = question.profile, question.cluster
    of_ranks = hvpipe.allgather_object(step_s)
    for name, plan in plans.items():
        bound_s = None
        if plan.contiguous:
            costs = costs_of(plan, profile, cluster)
            bound_s = lower_bound_s(schedule_of(plan), costs, dataflow_of(plan, profile))
        forecast_s = forecast(plan, profile, cluster).step_s
        yield MeasuredPlan(name, len(plan.stages), [rank[name] for rank in of_ranks], forecast_s, bound_s)
