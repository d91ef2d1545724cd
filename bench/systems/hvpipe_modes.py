"""hvpipe by overlap mode: Keras `fit` of a data-parallel model."""

from __future__ import annotations

from bench.rounds.job import RankJob
from bench.systems.keras_fit import fit
from bench.training.image_model import prepare_tensorflow
from bench.training.workloads import compiled_model

TRACE = "trace.json"


def train(job: RankJob) -> None:
    """Do a rank's part of a round."""
    keras = prepare_tensorflow(job.task.threads)
    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init(trace=str(job.directory / TRACE))
    # `stale` begins with exact steps, which in a timed round end within the warm-up.
    exact = {} if job.task.epochs else {"warmup_steps": 1}
    model = hk.data_parallel(compiled_model(keras, job.task), overlap=job.options["overlap"], **exact)
    job.versions["hvpipe"] = hvpipe.__version__
    job.meet("built")
    fit(keras, model, job)
    hvpipe.shutdown()  # writes the trace
