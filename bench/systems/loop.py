"""Training by a loop of one's own around a compiled step, where `fit` does not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.rounds.job import RankJob
from bench.training.workloads import evaluator, loss_of, runs_of


def run(keras: Any, model: Any, job: RankJob, data: Iterator[Any], step: Callable[[Any], Any]) -> None:
    """Train all of a job's steps: `step` takes a batch and returns what says that it is done."""
    evaluate = evaluator(keras, model, job)
    for epochs, steps, timed in runs_of(job):
        job.watch.begin(timed)
        for _ in range(epochs):
            for _ in range(steps):
                # As `fit` does, wait for the loss: on a GPU a step returns when it has been handed over.
                step(next(data)).numpy()
                job.watch.step()
            if evaluate is not None:
                job.watch.epoch(evaluate)
    job.watch.drained()


def replica_step(keras: Any, model: Any, optimizer: Any, part: float) -> Callable[[Any], Any]:
    """A replica's step under a strategy, which adds up what all replicas do: `part` of the batch's mean."""
    import tensorflow as tf

    def step(batch: Any) -> Any:
        # Under a strategy Keras divides a mean loss by the replicas in sync, as if all had as many samples.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = loss_of(keras, model, batch) * (replicas * part)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step
