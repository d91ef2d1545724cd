"""What `hk.Checkpoint` adds to a training step: `mpirun -np 2 python -m bench.step.checkpoint_cost`.

Every round trains the same steps without a checkpoint, with one never due, and one every N steps. The
last pays for the copy and for the cores that the writing thread takes; its share grows with 1 / N.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk


def _model(width: int) -> Any:
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(1e-4, momentum=0.9), "mse")
    return hk.data_parallel(model)


def _fit_s(model: Any, data: Any, steps: int, callbacks: list[Any]) -> float:
    """Return the mean time of a step in seconds, without the final checkpoint."""
    begun_s = 0.0
    ended_s = 0.0

    class Clock(keras.callbacks.Callback):
        reads_weights = stops_training = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal begun_s
            begun_s = time.monotonic()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            nonlocal ended_s
            ended_s = time.monotonic()

    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[*callbacks, Clock()])
    return (ended_s - begun_s) / steps


def main() -> None:
    """Measure, and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of 4 dense layers (default: 1024)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60, help="of a fit (default: 60)")
    parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints (default: 50)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    hvpipe.init()
    folder = Path(hvpipe.broadcast_object(tempfile.mkdtemp(prefix="hvpipe-cost-")))
    random = np.random.default_rng(hvpipe.rank())
    x = random.normal(size=(arguments.batch, arguments.width)).astype(np.float32)
    y = random.normal(size=(arguments.batch, 10)).astype(np.float32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model = _model(arguments.width)
    _fit_s(model, data, 5, [])
    names = ("no checkpoint", "never due", f"every {arguments.every} steps")
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name, seconds in found.items():
            every = 10**9 if name == "never due" else arguments.every
            checkpoint = hk.Checkpoint(folder / f"{number}-{every}", every=every, keep=1)
            callbacks = [] if name == "no checkpoint" else [checkpoint]
            seconds.append(_fit_s(model, data, arguments.steps, callbacks))
    if hvpipe.rank() == 0:
        base = statistics.median(found["no checkpoint"])
        megabytes = sum(v.numpy().nbytes for v in [*model.variables, *model.optimizer.variables]) / 1e6
        print(f"{hvpipe.size()} ranks, {megabytes:.0f} MB of state, {arguments.rounds} rounds")
        for name, seconds in found.items():
            middle = statistics.median(seconds)
            listed = ", ".join(f"{1000 * s:.1f}" for s in seconds)
            share = 100 * (middle / base - 1)
            print(f"{name:16s} {1000 * middle:8.2f} ms a step {share:+6.2f} %   ({listed})")
        shutil.rmtree(folder, ignore_errors=True)
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
