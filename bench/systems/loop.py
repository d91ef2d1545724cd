"""The training loops of the systems: Keras `fit`, and a hand-written one where `fit` does not work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.rounds.job import RankJob
from bench.rounds.watch import fit_callback
from bench.training.workloads import batches_of, evaluator, loss_of, runs_of


def fit(keras: Any, model: Any, job: RankJob, within: Sequence[Any] = (), data: Any = None) -> None:
    """Train all of a job's steps: one `fit` for each run, which ends with draining.

    What the callbacks `within` do in a batch is part of the step. `data`: batches for Keras on JAX, where
    TensorFlow is not installed.
    """
    evaluate = evaluator(keras, model, job)
    for epochs, steps, timed in runs_of(job):
        model.fit(
            batches_of(job) if data is None else data,
            epochs=epochs,
            steps_per_epoch=steps,
            verbose=0,
            shuffle=False,  # the dataset is in order
            callbacks=[*within, fit_callback(keras, job.watch, evaluate, timed=timed)],
        )
    job.watch.drained()


def run(keras: Any, model: Any, job: RankJob, data: Iterator[Any], step: Callable[[Any], Any]) -> None:
    """Train all of a job's steps. `step` takes a batch and returns a tensor that is there when it is done."""
    evaluate = evaluator(keras, model, job)
    for epochs, steps, timed in runs_of(job):
        job.watch.begin(timed)
        for _ in range(epochs):
            for _ in range(steps):
                # Wait for the loss, as `fit` does: on a GPU a step returns once it is enqueued.
                step(next(data)).numpy()
                job.watch.step()
            if evaluate is not None:
                job.watch.epoch(evaluate)
    job.watch.drained()


def replica_step(keras: Any, model: Any, optimizer: Any, size: int) -> Callable[[Any], Any]:
    """Return the step of one of `size` ranks, whose updates add up to that of the mean over all samples."""
    import tensorflow as tf

    def step(batch: Any) -> Any:
        # Under a strategy Keras divides a mean loss by its number of replicas: 1 with parameter servers.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = loss_of(keras, model, batch) * (replicas / size)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step
