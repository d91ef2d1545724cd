"""Training by a hand-written loop around a compiled step, for systems that `fit` does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.rounds.job import RankJob
from bench.training.workloads import evaluator, loss_of, runs_of


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


def replica_step(keras: Any, model: Any, optimizer: Any, part: float) -> Callable[[Any], Any]:
    """Return a replica's step: `part` of the batch's mean. The strategy adds up all replicas."""
    import tensorflow as tf

    def step(batch: Any) -> Any:
        # Under a strategy Keras divides a mean loss by the number of replicas, as if all had equal samples.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = loss_of(keras, model, batch) * (replicas * part)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step
