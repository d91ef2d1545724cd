"""Horovod: a compiled step with DistributedGradientTape, as its documentation recommends for loops."""

from __future__ import annotations

import sys
from typing import Any

from bench.rounds.job import RankJob
from bench.systems import loop
from bench.training.prepare import claim_gpu, prepare_tensorflow
from bench.training.workloads import batches_of, loss_of, make_model, make_optimizer


def train(job: RankJob) -> None:
    keras = prepare_tensorflow(job.task.threads)
    claim_gpu(*job.local_rank_and_size)
    import horovod
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    if (hvd.rank(), hvd.size()) != (job.rank, job.size):
        raise RuntimeError(
            f"Horovod should see rank {job.rank} of {job.size}. Received: {hvd.rank()} of {hvd.size()}"
        )
    if tf.config.get_visible_devices("GPU") and not hvd.nccl_built():
        raise RuntimeError(
            "On GPUs Horovod should be built with NCCL (HOROVOD_GPU_OPERATIONS=NCCL): name its Python by "
            f"--python. Received: Horovod {horovod.__version__} without NCCL in {sys.executable}"
        )
    job.versions["Horovod"] = horovod.__version__
    model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
    variables = [v.value for v in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([v.value for v in model.variables], root_rank=0)

    @tf.function(jit_compile=False)
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(keras, model, batch)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    job.meet("built")
    loop.run(keras, model, job, iter(batches_of(job)), step)
    hvd.shutdown()
