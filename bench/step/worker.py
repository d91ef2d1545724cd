"""What every rank of the step benchmark does: train each mode in turn, round after round, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from bench.metrics import median, ring_factor
from bench.step.report import ALONE, ALONE_AND_TCP, ModeRound, StepReport
from bench.step.ring_stream import RingStream
from bench.training.image_model import (
    ImageWorkload,
    compiled_model,
    gradient_bytes,
    images,
    prepare_tensorflow,
    timed_fit,
)


@dataclass(frozen=True)
class StepOptions:
    """Which modes of hvpipe, and for how long: `rounds` of `steps` each, after `warm_up` steps.

    `beside_tcp` adds computing alone while plain TCP moves as many bytes between the hosts as gradients
    would. `every`: the steps of a round of "local". The last round of a fit waits for the link.
    """

    modes: tuple[str, ...] = ("none", "backward", "step", "stale")
    rounds: int = 3
    steps: int = 6
    warm_up: int = 3
    beside_tcp: bool = False
    every: int = 16

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.steps < 2 or self.warm_up < 1:
            raise ValueError(f"StepOptions needs rounds >= 1, steps >= 2, warm_up >= 1. Received: {self}")


def _meet() -> None:
    """Wait for all ranks without spinning, so that no time is taken from those that still compute."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


def _models(
    keras: Any, workload: ImageWorkload, options: StepOptions, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return one model for computing alone and one for each mode."""
    models = {}
    for mode in (ALONE, *options.modes):
        say(f"building {mode} ...")
        model = compiled_model(keras, workload)
        if mode != ALONE:
            import hvpipe.keras as hk

            rounds = {"every": options.every} if mode == "local" else {}
            # `stale` begins with exact steps, which here end within the warm-up.
            model = hk.data_parallel(model, overlap=mode, warmup_steps=1, **rounds)
        models[mode] = model
    return models


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _counters(mode: str) -> dict[str, float]:
    if mode in (ALONE, ALONE_AND_TCP):
        return {}
    import hvpipe

    return dict(hvpipe.counters())


def _moves_bytes(keras: Any, stream: RingStream) -> Any:
    """Return a callback that starts a step's bytes at its begin, and ends the step only when they arrived."""

    class MovesBytes(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            stream.begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            stream.wait()

    return MovesBytes()


def one_round(
    keras: Any, mode: str, model: Any, data: Any, steps: int, within: Sequence[Any] = ()
) -> ModeRound:
    """Train one mode on all ranks at once. Every rank gets all ranks' times."""
    _meet()
    before = _counters(mode)
    step_s, rest_s = timed_fit(keras, model, data, steps, within)
    wall_s = (sum(step_s) + rest_s) / steps
    grown = _grown(before, _counters(mode))
    _meet()
    # In mode `step` the first step of a round collects nothing, and in every mode it starts an iterator.
    everyone = MPI.COMM_WORLD.allgather((step_s[1:], wall_s))
    return ModeRound(mode, [steps_s for steps_s, _ in everyone], [wall for _, wall in everyone], grown)


def measure(
    workload: ImageWorkload, options: StepOptions, where: str, say: Callable[[str], None]
) -> StepReport:
    """Train all rounds. Every rank calls this and gets the report. `say` is called on rank 0."""
    world = MPI.COMM_WORLD
    tell = say if world.rank == 0 else lambda text: None
    keras = prepare_tensorflow(workload.threads)
    if options.modes:
        import hvpipe

        hvpipe.init()
    hosts = len(set(world.allgather(MPI.Get_processor_name())))
    if options.beside_tcp and hosts == 1:
        raise ValueError(
            "Plain TCP beside computing needs ranks on several hosts. Received: ranks on one host"
        )
    models = _models(keras, workload, options, tell)
    data = images(workload, world.rank)
    for mode, model in models.items():
        tell(f"tracing and warming up {mode} ...")
        one_round(keras, mode, model, data, options.warm_up + 1)
    within: dict[str, list[Any]] = {}
    if options.beside_tcp:
        stream = RingStream(world, round(ring_factor(hosts) * gradient_bytes(models[ALONE])))
        models[ALONE_AND_TCP] = models[ALONE]
        within[ALONE_AND_TCP] = [_moves_bytes(keras, stream)]
    rounds = []
    for index in range(options.rounds):
        for mode, model in models.items():
            rounds.append(one_round(keras, mode, model, data, options.steps, within.get(mode, ())))
            tell(f"round {index + 1} of {options.rounds}: {mode} {median(rounds[-1].step_s[0]):.3f} s")
    if options.beside_tcp:
        stream.close()
    return StepReport(
        workload.describe(),
        where,
        _versions(keras),
        world.size,
        hosts,
        workload.batch,
        gradient_bytes(models[ALONE]),
        tuple(rounds),
    )


def _versions(keras: Any) -> str:
    import tensorflow as tf

    mpi = MPI.Get_library_version().split(",")[0].strip()
    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {mpi}, {os.cpu_count()} cores"
