"""hvpipe by overlap mode and compression: Keras `fit` of a data-parallel model."""

from __future__ import annotations

from typing import Any

from bench.rounds.job import RankJob
from bench.systems.loop import fit
from bench.training.prepare import prepare_tensorflow
from bench.training.workloads import compiled_model

EXACT_STEPS = 20  # at the start of a training by epochs


def train(job: RankJob) -> None:
    keras = prepare_tensorflow(job.task.threads)
    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init()
    options: dict[str, Any] = dict(job.options)
    options |= {name: int(options[name]) for name in ("every", "fragments") if name in options}
    # Some modes begin with exact steps, which a timed round must not measure.
    options["warmup_steps"] = EXACT_STEPS if job.task.epochs else 0
    model = hk.data_parallel(compiled_model(keras, job.task), **options)
    job.versions["hvpipe"] = hvpipe.__version__
    job.meet("built")
    fit(keras, model, job)
    hvpipe.shutdown()
