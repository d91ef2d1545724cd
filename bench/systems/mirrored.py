"""TensorFlow's MultiWorkerMirroredStrategy: gradients are reduced around a ring of workers, over gRPC."""

from __future__ import annotations

from typing import Any

from bench.job import Job
from bench.systems import loop
from bench.workloads import batches_of, loss_of, make_model, make_optimizer, prepare


def train(job: Job) -> None:
    """A rank's part of a round; TF_CONFIG tells of the others."""
    keras = prepare(job.task)
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    with strategy.scope():
        model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
        optimizer.build(model.trainable_variables)
    # Its optimizer adds up the gradients of all ranks: a rank's part in the mean is that of its samples.
    part = job.batch / sum(job.batches)

    def replica_step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(keras, model, batch) * part
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function(jit_compile=False)
    def step(batch: Any) -> Any:
        return strategy.run(replica_step, (batch,))

    job.meet("built")
    loop.run(keras, model, job, iter(batches_of(job)), step)
    job.meet("trained")
