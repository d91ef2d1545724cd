"""TensorFlow's ParameterServerStrategy: workers pull variables from servers and push gradients to them.

``python -m bench.systems.parameter_server DIRECTORY JOB INDEX`` is a worker or a parameter server. It serves
until it is ended. Steps are timed by the coordinator. What workers and servers use is not measured.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.rounds.job import RankJob
from bench.systems.loop import replica_step
from bench.training.prepare import own_gpu, prepare_tensorflow
from bench.training.workloads import batches_of, evaluator, make_model, make_optimizer, runs_of


def train(job: RankJob) -> None:
    """Do the coordinator's part of a round: hand steps to the workers, and measure for all of them."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the coordinator computes nothing
    keras = prepare_tensorflow(job.task.threads)
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
        optimizer.build(model.trainable_variables)

    of_replica = replica_step(keras, model, optimizer, job.size)

    @tf.function(jit_compile=False)
    def step_on(batch: Any) -> Any:
        return strategy.run(of_replica, (batch,))

    @tf.function(jit_compile=False)
    def step_from(iterator: Any) -> Any:
        return strategy.run(of_replica, (next(iterator),))

    if job.task.epochs:
        # The coordinator hands out the examples, so that each is used once in an epoch.
        shards = itertools.cycle([iter(batches_of(job, rank)) for rank in range(job.size)])
        schedule = lambda: coordinator.schedule(step_on, args=(next(next(shards)),))  # noqa: E731
    else:
        iterator = iter(coordinator.create_per_worker_dataset(lambda: batches_of(job)))
        schedule = lambda: coordinator.schedule(step_from, args=(iterator,))  # noqa: E731
    _run(job, schedule, coordinator, evaluator(keras, model, job))
    times = replace(job.watch.rank_round(), cpu_share=0.0, peak_bytes=0, sent_bytes=0, host_share=None)
    job.by_rank = dict.fromkeys(range(job.size), times)


def _run(
    job: RankJob,
    schedule: Callable[[], Any],
    coordinator: Any,
    evaluate: Callable[[], tuple[float, float]] | None,
) -> None:
    for epochs, steps, timed in runs_of(job):
        job.watch.begin(timed)
        for _ in range(epochs):
            waiting = [schedule() for _ in range(steps * job.size)]
            for last in waiting[job.size - 1 :: job.size]:
                last.fetch()
                job.watch.step()
            coordinator.join()
            if evaluate is not None:
                job.watch.epoch(evaluate)
    job.watch.drained()


def serve(directory: Path, job: str, index: int) -> None:
    """Start the server that TF_CONFIG describes."""
    what = json.loads((directory / "job.json").read_text())
    os.environ.update(what["environment"])
    if job == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # variables stay in memory; GPUs are for the workers
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=what["task"]["threads"])
    # TensorFlow's tutorial on parameter servers: with fewer cores than this, workers wait for ever.
    if (os.cpu_count() or 1) < what["size"] + 1:
        config.inter_op_parallelism_threads = what["size"] + 1
    gpu = own_gpu(*what["local_ranks_and_sizes"][index]) if job == "worker" else None
    if gpu is not None:
        config.gpu_options.visible_device_list = str(gpu)
        config.gpu_options.allow_growth = True
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tf.distribute.Server(
        resolver.cluster_spec(), job_name=job, task_index=index, protocol="grpc", config=config
    ).join()  # until it is ended


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
