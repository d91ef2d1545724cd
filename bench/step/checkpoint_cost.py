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


def _fit_s(model: Any, data: Any, steps: int, callbacks: list[Any]) -> tuple[float, float]:
    """Return the mean time of a step and its CPU time, in seconds; without the final checkpoint."""
    begun_s = ended_s = (0.0, 0.0)

    class Clock(keras.callbacks.Callback):
        reads_weights = stops_training = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal begun_s
            begun_s = time.monotonic(), time.process_time()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            nonlocal ended_s
            ended_s = time.monotonic(), time.process_time()

    model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[*callbacks, Clock()])
    return (ended_s[0] - begun_s[0]) / steps, (ended_s[1] - begun_s[1]) / steps


def _print(found: dict[str, list[tuple[float, float]]]) -> None:
    print(f"{'median of a step':18s} {'ms':>8s} {'':>9s} {'CPU ms':>8s}")
    base_s, base_cpu_s = (statistics.median(one) for one in zip(*found["no checkpoint"], strict=True))
    for name, rounds in found.items():
        wall_s, cpu_s = (statistics.median(one) for one in zip(*rounds, strict=True))
        wall, cpu = 100 * (wall_s / base_s - 1), 100 * (cpu_s / base_cpu_s - 1)
        print(f"{name:18s} {1000 * wall_s:8.2f} {wall:+7.1f} % {1000 * cpu_s:8.2f} {cpu:+7.1f} %")


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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(arguments.rounds):
        for name, seconds in found.items():
            every = 10**9 if name == "never due" else arguments.every
            checkpoint = hk.Checkpoint(folder / f"{number}-{every}", every=every, keep=1)
            callbacks = [] if name == "no checkpoint" else [checkpoint]
            seconds.append(_fit_s(model, data, arguments.steps, callbacks))
    if hvpipe.rank() == 0:
        megabytes = sum(v.numpy().nbytes for v in [*model.variables, *model.optimizer.variables]) / 1e6
        print(f"{hvpipe.size()} ranks, {megabytes:.0f} MB of state, {arguments.rounds} rounds")
        _print(found)
        shutil.rmtree(folder, ignore_errors=True)
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
