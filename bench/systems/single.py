"""Plain Keras in one process. Several ranks are as many processes that compute at once and share nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.metrics import median
from bench.rounds.job import RankJob
from bench.rounds.timed_steps import counted
from bench.systems.keras_fit import fit
from bench.training.image_model import claim_gpu, gradient_bytes, prepare_tensorflow
from bench.training.workloads import batches_of, compiled_model, loss_of, train_whole_steps


def train(job: RankJob) -> None:
    """Do a rank's part of a round."""
    keras = prepare_tensorflow(job.task.threads)
    claim_gpu(*job.local_rank_and_size)
    train_whole_steps(job)
    model = compiled_model(keras, job.task)
    job.gradient_bytes = gradient_bytes(model, tables=False)
    # All should compute at once, and nothing else keeps them in step.
    job.watch.at_window = lambda: job.meet("window")
    job.meet("built")
    fit(keras, model, job)
    if not job.task.epochs:
        job.meet("trained")
        job.parts_s = _parts(keras, model, job)


def _parts(keras: Any, model: Any, job: RankJob) -> dict[str, float]:
    """Return the times of forward and update, each compiled and timed by itself; backward is the rest of a
    step.
    """
    import tensorflow as tf

    batch = next(iter(batches_of(job)))

    @tf.function(jit_compile=False)
    def forward() -> Any:
        return loss_of(keras, model, batch)

    @tf.function(jit_compile=False)
    def update() -> Any:
        model.optimizer.apply([tf.zeros(v.shape, v.dtype) for v in model.trainable_variables])
        return tf.constant(0)

    forward_s, update_s = _median_s(forward, job), _median_s(update, job)
    rest_s = median(counted(job.task, job.watch.step_s)) - forward_s - update_s
    return {"forward": forward_s, "backward": max(0.0, rest_s), "update": update_s}


def _median_s(run: Callable[[], Any], job: RankJob) -> float:
    taken_s = []
    for _ in range(1 + job.task.steps):
        began_s = time.monotonic()
        run().numpy()
        taken_s.append(time.monotonic() - began_s)
    return median(taken_s[1:])
