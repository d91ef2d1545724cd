"""Training by Keras `fit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.rounds.job import RankJob
from bench.rounds.watch import fit_callback
from bench.training.workloads import batches_of, evaluator, runs_of


def fit(keras: Any, model: Any, job: RankJob, within: Sequence[Any] = ()) -> None:
    """Train all of a job's steps: one `fit` for each run, which ends with draining.

    What the callbacks `within` do in a batch is part of the step.
    """
    evaluate = evaluator(keras, model, job)
    for epochs, steps, timed in runs_of(job):
        model.fit(
            batches_of(job),
            epochs=epochs,
            steps_per_epoch=steps,
            verbose=0,
            shuffle=False,  # the dataset is in order
            callbacks=[*within, fit_callback(keras, job.watch, evaluate, timed=timed)],
        )
    job.watch.drained()
