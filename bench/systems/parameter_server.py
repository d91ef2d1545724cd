"""TensorFlow's ParameterServerStrategy: workers pull variables from servers and push gradients to them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.rounds import meter
from bench.rounds.job import RankJob
from bench.rounds.record import RankRound
from bench.systems.loop import replica_step
from bench.systems.server_process import ask_for_readings, wait_for_reading
from bench.training.prepare import prepare_tensorflow
from bench.training.workloads import batches_of, evaluator, make_model, make_optimizer, runs_of


def train(job: RankJob) -> None:
    """Do the coordinator's part of a round: hand steps to the workers, and measure for all of them."""
    if len(set(job.batches)) > 1:
        raise ValueError(
            "Workers of parameter servers share out the work as they go, so shares should be equal. "
            f"Received: shares={job.task.shares}"
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the coordinator computes nothing
    keras = prepare_tensorflow(job.task.threads)
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model, optimizer = make_model(keras, job.task), make_optimizer(keras, job.task)
        optimizer.build(model.trainable_variables)

    # Each worker's update is its part of the step.
    of_replica = replica_step(keras, model, optimizer, 1 / job.size)

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
    job.watch.at_window = lambda: ask_for_readings(job.directory, "begin")
    _run(job, schedule, coordinator, evaluator(keras, model, job))
    ask_for_readings(job.directory, "end")
    job.by_rank = {rank: _with_servers(job, rank) for rank in range(job.size)}


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


def _with_servers(job: RankJob, rank: int) -> RankRound:
    """Return a rank's figures: those of its worker, and its part of the host's parameter server."""
    jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
    hosts = [address.rpartition(":")[0] for address in jobs["worker"]]
    servers = [address.rpartition(":")[0] for address in jobs["ps"]]
    worker = _used(job, "worker", rank)
    server = _used(job, "ps", servers.index(hosts[rank]))
    part = 1 / hosts.count(hosts[rank])
    return replace(
        job.watch.rank_round(),
        cpu_share=(worker.cpu_s + part * server.cpu_s) / job.watch.timed_s,
        peak_bytes=round(worker.peak_bytes + part * server.peak_bytes),
        sent_bytes=worker.sent_bytes // len(job.watch.step_s),
        utilization={},  # that of the coordinator says nothing
    )


def _used(job: RankJob, what: str, index: int) -> meter.Reading:
    """Return what a process used in the timed part. Its peak memory is of its whole life."""
    first, last = (wait_for_reading(job.directory, what, index, moment) for moment in ("begin", "end"))
    return replace(last, cpu_s=last.cpu_s - first.cpu_s, sent_bytes=last.sent_bytes - first.sent_bytes)
