"""What every rank of the pipeline benchmark does: profile, plan by each method, train each plan in turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.metrics import median
from bench.pipeline.report import Case, PipelineReport
from bench.training.image_model import MODELS, Workload, images, prepare_tensorflow, timed_fit
from bench.training.workloads import transformer_trunk

# Kinds of computing, and the counters of their seconds.
_COMPUTING = {kind: f"{kind}_s" for kind in ("forward", "backward", "update")}


@dataclass(frozen=True)
class Effort:
    """Which plans, in how many micro-batches (None: what greedy finds best), and how long each is trained."""

    methods: tuple[str, ...] = ("greedy", "random")
    seeds: int = 2
    schedule: str = "1f1b"
    microbatches: int | None = None
    chunks: int = 1
    rounds: int = 3
    steps: int = 3


def model_function(keras: Any, workload: Workload) -> Callable[[], Any]:
    """Builds the workload's model; not compiled."""
    shape = (workload.pixels, workload.pixels, 3)

    def build() -> Any:
        if workload.model == "transformer":
            return _transformer(keras, workload.pixels, workload.classes)
        application = getattr(keras.applications, MODELS[workload.model])
        return application(weights=None, input_shape=shape, classes=workload.classes)

    return build


def _transformer(keras: Any, length: int, tokens: int) -> Any:
    """A class for each sequence of `length` tokens."""
    inputs, x = transformer_trunk(keras, length, tokens, width=256, blocks=6)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(tokens, activation="softmax")(x))


def _batches(workload: Workload) -> Any:
    """The same endless batch on every rank."""
    if workload.model != "transformer":
        return images(workload, 0)
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(100)
    x = random.integers(0, workload.classes, (workload.batch, workload.pixels))
    options = tf.data.Options()
    options.autotune.enabled = False
    data = (x.astype(np.int32), random.integers(0, workload.classes, workload.batch))
    return tf.data.Dataset.from_tensors(data).repeat().prefetch(2).with_options(options)


def _describe(workload: Workload) -> str:
    return workload.describe().replace("a rank", "in all").replace("SGD momentum", "SGD")


def _counted(keras: Any, counters: Callable[[], dict[str, float]]) -> Any:
    """A callback that knows the counters `before` the second step of a `fit`: the first counts in no step."""

    class Counted(keras.callbacks.Callback):  # type: ignore[misc]
        before = counters()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.before = counters()

    return Counted()


def _foreseen_s(foreseen: Any, kind: str, device: str) -> float:
    """What the device computes of that kind in the simulated step."""
    ranks = foreseen.plan.ranks
    events = foreseen.trace.of(kind, ranks.index(device)) if device in ranks else []
    return sum(event.end_s - event.start_s for event in events)


def measure(workload: Workload, effort: Effort, where: str, say: Callable[[str], None]) -> PipelineReport:
    """Profile once, then train every plan in rounds; every rank calls it, and gets the report."""
    keras = prepare_tensorflow(workload.threads)
    import hvpipe
    import hvpipe.keras as hk
    from hvpipe.commands.plan import Question, finest
    from hvpipe.forecast import costs_of, dataflow_of, forecast, schedule_of
    from hvpipe.forecast.lower_bound import lower_bound_s
    from hvpipe.keras.profiling.cluster import measure_cluster
    from hvpipe.plan.baselines import baseline
    from hvpipe.plan.greedy import partition
    from hvpipe.plan.pipelining import Pipelining

    hvpipe.init()
    tell = say if hvpipe.rank() == 0 else lambda text: None
    build = model_function(keras, workload)
    tell("profiling ...")
    x, y = next(iter(_batches(workload)))
    ranks = hvpipe.size()

    def profile_of(samples: int) -> Any:
        return hk.measure(build, (x[:samples], y[:samples]), progress=False, optimizer="sgd")

    size = math.ceil(workload.batch / (effort.microbatches or 8))
    measured = profile_of(size)
    cluster = hvpipe.broadcast_object(measure_cluster(measured))
    measured = hvpipe.broadcast_object(measured)

    def ask(microbatches: int) -> Question:
        how = Pipelining(effort.schedule, microbatches, chunks=effort.chunks)
        profile = measured.at_batch(math.ceil(workload.batch / microbatches))
        return Question(profile, cluster, how, ranks * effort.chunks)

    count = effort.microbatches
    if count is None:
        count = finest(ask, workload.batch).pipelining.microbatches
        if (chosen := math.ceil(workload.batch / count)) != size:
            tell(f"profiling micro-batches of {chosen} samples ...")
            measured = hvpipe.broadcast_object(profile_of(chosen))
    question = ask(count)
    profile, how = question.profile, question.pipelining
    pipes = {}
    plans = {}
    for method in effort.methods:
        for seed in range(effort.seeds if method.startswith("random") else 1):
            name = f"{method} {seed}" if method.startswith("random") else method
            if method == "greedy":
                plans[name] = partition(profile, cluster, ranks * effort.chunks, how)
            else:
                plans[name] = baseline(method, profile, cluster, ranks, how, seed=seed)
            keras.utils.set_random_seed(20)
            pipes[name] = hk.pipeline_parallel(build, plans[name])
            pipes[name].compile(keras.optimizers.SGD(0.01), loss="sparse_categorical_crossentropy")
            tell(f"tracing and warming up {name} ...")
            timed_fit(keras, pipes[name], _batches(workload), 2)
    steps: dict[str, list[float]] = {name: [] for name in pipes}
    computing: dict[str, Counter[str]] = {name: Counter() for name in pipes}
    for number in range(effort.rounds):
        for name, pipe in pipes.items():
            hvpipe.barrier()
            counted = _counted(keras, hvpipe.counters)
            found, _ = timed_fit(keras, pipe, _batches(workload), effort.steps, [counted])
            after = hvpipe.counters()
            computing[name].update({kind: after[kind] - counted.before[kind] for kind in _COMPUTING.values()})
            steps[name].extend(found[1:] or found)
            tell(f"round {number + 1} of {effort.rounds}: {name} {median(found):.3f} s")
    everyone = hvpipe.allgather_object(steps)
    trained = effort.rounds * max(1, effort.steps - 1)
    computed = hvpipe.allgather_object(computing)
    cases = []
    for name, plan in plans.items():
        bound_s = None
        if plan.contiguous:
            costs = costs_of(plan, profile, cluster)
            bound_s = lower_bound_s(schedule_of(plan), costs, dataflow_of(plan, profile))
        foreseen = forecast(plan, profile, cluster)
        cases.append(
            Case(
                method=name,
                stages=len(plan.stages),
                step_s=[of_rank[name] for of_rank in everyone],
                forecast_s=foreseen.step_s,
                bound_s=bound_s,
                busy=[
                    {
                        kind: (of_rank[name][counter] / trained, _foreseen_s(foreseen, kind, device.name))
                        for kind, counter in _COMPUTING.items()
                    }
                    for device, of_rank in zip(cluster.devices, computed, strict=True)
                    if plan.contiguous
                ],
            )
        )
    return PipelineReport(
        _describe(workload),
        where,
        effort.schedule,
        how.microbatches,
        ranks,
        workload.batch,
        tuple(cases),
    )
