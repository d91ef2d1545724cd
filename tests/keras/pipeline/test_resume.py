"""A job resumes from its checkpoint on a different number of ranks, as if it had never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distributed import launch

SCRIPT = """
import json, sys
import keras, numpy as np
import hvpipe, hvpipe.keras as hk

hvpipe.init()

def build():
    inputs = x = keras.Input((6,))
    for units in (8, 7, 9, 6):
        x = keras.layers.Dense(units, activation="tanh")(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))

def train(checkpoint, how, epochs):
    keras.utils.set_random_seed(5)
    pipe = hk.pipeline_parallel(build, microbatches=4)
    pipe.compile(keras.optimizers.Adam(0.01), "mse")
    if how == "resume":
        pipe.load_checkpoint(checkpoint)
    random = np.random.default_rng(3)
    x, y = random.normal(size=(24, 6)).astype("float32"), random.normal(size=(24, 2))
    losses = pipe.fit(x, y, batch_size=8, epochs=int(epochs), shuffle=False, verbose=0).history["loss"]
    pipe.save_checkpoint(checkpoint)
    if hvpipe.rank() == 0:
        print(json.dumps({"loss": losses, "steps": int(pipe.optimizer.iterations)}), flush=True)

for arguments in sys.argv[1:]:
    train(*arguments.split(":"))
hvpipe.shutdown()
"""


@pytest.mark.parametrize(("before", "after"), [(1, 2)])
def test_a_job_continues_on_another_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)

    def job(size: int, *trainings: str) -> list[dict[str, Any]]:
        result = launch(size, [script, *(f"{tmp_path}/{training}" for training in trainings)], limit_s=240)
        assert result.returncode == 0, result.describe()
        return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]

    # Both trainings run in one job, because TensorFlow starts slowly.
    whole, first = job(before, "whole:start:3", "cut:start:1")
    (second,) = job(after, "cut:resume:2")
    assert first["loss"] + second["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert second["steps"] == whole["steps"] == 9
