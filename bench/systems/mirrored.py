"""TensorFlow's MultiWorkerMirroredStrategy: gradients are reduced in a ring over gRPC, on GPUs by NCCL."""

from __future__ import annotations

from typing import Any

from bench.rounds.job import RankJob
from bench.systems import loop
from bench.training.prepare import claim_gpu, prepare_tensorflow
from bench.training.workloads import batches_of, make_model, make_optimizer


def train(job: RankJob) -> None:
    """Do a rank's part of a round. TF_CONFIG names the others."""
    keras = prepare_tensorflow(job.task.threads)
    claim_gpu(*job.local_rank_and_size)
    import tensorflow as tf

    reduced_by = _reduced_by(tf)
    job.versions["reduced by"] = reduced_by
    # Without XLA, TensorFlow joins the strategy's options to those of each reduction
    # (MirroredExtended._batch_reduce_to), so packs also apply to what Keras' optimizer reduces.
    options = tf.distribute.experimental.CommunicationOptions(
        bytes_per_pack=int(job.options["bytes_per_pack"]),
        implementation=tf.distribute.experimental.CommunicationImplementation[reduced_by],
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
        optimizer.build(model.trainable_variables)
    of_replica = loop.replica_step(keras, model, optimizer, job.size)

    @tf.function(jit_compile=False)
    def step(batch: Any) -> Any:
        return strategy.run(of_replica, (batch,))

    job.meet("built")
    data = iter(batches_of(job))
    loop.run(keras, model, job, data, step)
    job.meet("trained")
    job.versions["all-reduces a step"] = str(_all_reduces(step, next(data)))


def _reduced_by(tf: Any) -> str:
    """Return NCCL between GPUs, which TensorFlow's documentation calls faster, else its ring."""
    return "NCCL" if tf.config.get_visible_devices("GPU") else "RING"


def _all_reduces(step: Any, batch: Any) -> int:
    """Return how many all-reduces a compiled step has: one a pack, and those of other averages."""
    operations = step.get_concrete_function(batch).graph.get_operations()
    return sum(each.type.startswith("CollectiveReduce") for each in operations)
