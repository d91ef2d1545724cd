"""Keras on JAX: `fit` under keras.distribution's DataParallel, one process a rank, over Gloo on CPUs.

With the option `alone`, each process trains without the others.
"""

from __future__ import annotations

import json
import os

from bench.rounds.job import RankJob
from bench.systems.loop import fit
from bench.training.workloads import compiled_model, same_batch


def train(job: RankJob) -> None:
    """Do a rank's part of a round. TF_CONFIG names the others."""
    os.environ["NPROC"] = str(job.task.threads)  # of XLA's pool
    import jax
    import keras

    job.versions["JAX"] = jax.__version__
    shares = "alone" not in job.options
    if shares:
        first = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0]
        keras.distribution.initialize(first, job.size, job.rank)
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
        if (jax.process_index(), jax.process_count()) != (job.rank, job.size):
            raise RuntimeError(
                f"JAX should see rank {job.rank} of {job.size}. Received: {jax.process_index()} of "
                f"{jax.process_count()}"
            )
    model = compiled_model(keras, job.task, jit_compile="auto")
    job.watch.at_window = lambda: job.meet("window")
    job.meet("built")

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return job.task.warm_up + job.task.steps

        def __getitem__(self, index: int) -> object:
            return batch

    batch = same_batch(job)
    fit(keras, model, job, data=Batches())
