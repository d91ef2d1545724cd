"""TensorFlow's MultiWorkerMirroredStrategy: gradients are reduced around a ring of workers, over gRPC."""

from __future__ import annotations

from typing import Any

from bench.job import Job
from bench.systems import loop
from bench.workload import prepare_tensorflow
from bench.workloads import batches_of, make_model, make_optimizer


def train(job: Job) -> None:
    """A rank's part of a round; TF_CONFIG tells of the others."""
    keras = prepare_tensorflow(job.task.threads)
    import tensorflow as tf

    ring = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )
    with strategy.scope():
        model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
        optimizer.build(model.trainable_variables)
    # Its optimizer adds up the gradients of all ranks: a rank's part in the mean is that of its samples.
    of_replica = loop.replica_step(keras, model, optimizer, job.batch / sum(job.batches))

    @tf.function(jit_compile=False)
    def step(batch: Any) -> Any:
        return strategy.run(of_replica, (batch,))

    job.meet("built")
    loop.run(keras, model, job, iter(batches_of(job)), step)
    job.meet("trained")
