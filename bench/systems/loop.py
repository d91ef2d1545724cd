"""Training by a loop of one's own around a compiled step, where `fit` does not do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.job import Job
from bench.workloads import evaluator, runs_of


def run(keras: Any, model: Any, job: Job, data: Iterator[Any], step: Callable[[Any], Any]) -> None:
    """Train all of a job's steps: `step` takes a batch and returns what says that it is done."""
    evaluate = evaluator(keras, model, job)
    for epochs, steps, timed in runs_of(job):
        job.watch.begin(timed)
        for _ in range(epochs):
            for _ in range(steps):
                done = step(next(data))
                job.watch.step()
            done.numpy()  # what runs asynchronously has ended
            if evaluate is not None:
                job.watch.epoch(evaluate)
    job.watch.drained()
