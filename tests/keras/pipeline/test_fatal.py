"""An error on one rank of a pipeline ends all ranks soon, and the message gives the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed import expect_fatal

SCRIPT = """
import keras
import numpy as np
import hvpipe
import hvpipe.keras as hk

hvpipe.init()

def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])

class Raises(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if hvpipe.rank() == 1:
            raise ValueError("not on this rank")

def pipeline(microbatches=2):
    pipe = hk.pipeline_parallel(build, microbatches=microbatches)
    pipe.compile("sgd", "mse")
    return pipe

def replicated():
    model = keras.Sequential([build(), keras.layers.BatchNormalization()])
    pipe = hk.pipeline_parallel(model, stages=1)
    pipe.compile("sgd", "mse")
    return pipe

x, y = np.ones((8, 3)), np.ones((8, 2))
"""

CASES = {
    "a callback that raises": (
        "pipeline().fit(x, y, verbose=0, callbacks=[Raises()])",
        r"(?s)rank 1 of 2 on \S+ failed:\nTraceback.*ValueError: not on this rank",
    ),
    "micro-batches that differ": (
        "pipeline(2 + hvpipe.rank())",
        r"the same arguments on all ranks. Received: microbatches=2 on rank 0 and microbatches=3 on rank 1",
    ),
    "batches that differ": (
        "pipeline().fit(x, y, batch_size=4 + hvpipe.rank(), verbose=0)",
        r"ranks disagree.*a batch of [45].*a batch of [45]",
    ),
    "data of replicas that end early on one rank": (
        "replicated().fit(x[: 8 - 4 * hvpipe.rank()], y[: 8 - 4 * hvpipe.rank()], batch_size=4, verbose=0)",
        r"ranks disagree.*end of epoch 1",
    ),
    "a plan that one rank cannot read": (
        "hk.pipeline_parallel(build, __file__ if hvpipe.rank() == 1 else 'auto')",
        r"(?s)rank 1 of 2 on \S+ failed:\nTraceback.*case.py, line \d+, column \d+: should be JSON",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end(case: str, tmp_path: Path) -> None:
    does, says = CASES[case]
    script = tmp_path / "case.py"
    script.write_text(SCRIPT + does)
    expect_fatal(2, script, says=says, within_s=90)
