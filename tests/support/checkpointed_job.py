"""Trains a tiny model with a checkpoint, and says what its weights are: a job for tests that interrupt it.

checkpointed_job.py FOLDER [--every STEPS] [--epochs N] [--pause S] [--die-at STEP]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from typing import Any

import keras
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from training import CLASSES, FEATURES, loss, samples


class Events(keras.callbacks.Callback):
    """Says that training has begun, and what interrupts it."""

    reads_weights = False
    stops_training = False

    def __init__(self, options: Any) -> None:
        super().__init__()
        self._options = options
        self._steps = 0  # of this process

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == 1 and hvpipe.rank() == 0:
            print("TRAINING", flush=True)
        time.sleep(self._options.pause)
        if self._steps == self._options.die_at and hvpipe.rank() == hvpipe.size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--every", default="2steps")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--die-at", type=int, default=0)
    options = parser.parse_args()
    hvpipe.init()
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), loss())
    model = hk.data_parallel(model)
    data = tf.data.Dataset.from_tensor_slices(samples(4 * options.batches * hvpipe.size()))
    data = hk.shard(data.shuffle(1000, seed=3).batch(4))
    callbacks = [hk.Checkpoint(options.folder, every=options.every), Events(options)]
    model.fit(data, epochs=options.epochs, verbose=0, callbacks=callbacks)
    state = hashlib.sha256()
    for variable in [*model.variables, *model.optimizer.variables]:
        state.update(variable.numpy().tobytes())
    if hvpipe.rank() == 0:
        print(f"STATE {state.hexdigest()} {int(model.optimizer.iterations)}", flush=True)


if __name__ == "__main__":
    main()
