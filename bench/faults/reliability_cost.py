"""What checkpoints, and the watchdog with the flight recorder, add to a training step.

    mpirun -np 2 python -m bench.faults.reliability_cost

Every round trains the same steps three times, in an order of its own: as usual, with a checkpoint every N
steps, and without watchdog and recorder. A checkpoint costs the copy, and the cores that the writing thread
takes; its share grows with 1 / N. A cost is the median of its ratios within rounds, with its 95 % interval.
Fewer than six rounds give none: then the least and the largest ratio are shown.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.session import current

_USUAL, _SAVES, _UNWATCHED = "as usual", "checkpoints", "not watched"


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


def _ratio(name: str, rounds: Sequence[float], base: Sequence[float]) -> str:
    """Return the cost in words: the median ratio, between the order statistics that hold it in 95 %."""
    ratios = sorted(100 * (one / other - 1) for one, other in zip(rounds, base, strict=True))
    reach = 0.98 * math.sqrt(len(ratios))
    low, high = (len(ratios) - 1) / 2 - reach, (len(ratios) - 1) / 2 + reach
    ends = ratios[max(0, math.floor(low))], ratios[min(len(ratios) - 1, math.ceil(high))]
    kind = "in 95 %" if len(ratios) > 5 else "in all rounds"
    return f"{name:32s} {statistics.median(ratios):+6.2f} % ({ends[0]:+.2f} to {ends[1]:+.2f} {kind})"


def _print(found: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    for which, unit in enumerate(("step", "CPU time of a step")):
        of = {name: [times[which] for times in rounds] for name, rounds in found.items()}
        print(f"{unit}: median {1000 * statistics.median(of[_USUAL]):.2f} ms")
        print(_ratio("  a checkpoint adds", of[_SAVES], of[_USUAL]))
        print(_ratio("  watchdog and recorder add", of[_USUAL], of[_UNWATCHED]))


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
    normal = np.random.default_rng(hvpipe.rank()).normal
    x = normal(size=(arguments.batch, arguments.width)).astype(np.float32)
    y = normal(size=(arguments.batch, 10)).astype(np.float32)
    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    model = _model(arguments.width)
    _fit_s(model, data, 5, [])
    found: dict[str, list[tuple[float, float]]] = {_USUAL: [], _SAVES: [], _UNWATCHED: []}
    dice, core = random.Random(0), current().engine.native
    for number in range(arguments.rounds):
        for name in dice.sample([*found], len(found)):
            core.watch(name != _UNWATCHED)
            saves = hk.Checkpoint(folder / str(number), every=arguments.every, keep=1)
            found[name].append(_fit_s(model, data, arguments.steps, [saves] if name == _SAVES else []))
    if hvpipe.rank() == 0:
        megabytes = sum(v.numpy().nbytes for v in [*model.variables, *model.optimizer.variables]) / 1e6
        print(
            f"{hvpipe.size()} ranks, {megabytes:.0f} MB of state, {arguments.rounds} rounds of "
            f"{arguments.steps} steps, a checkpoint every {arguments.every}"
        )
        _print(found)
        shutil.rmtree(folder, ignore_errors=True)
    hvpipe.shutdown()


if __name__ == "__main__":
    main()
