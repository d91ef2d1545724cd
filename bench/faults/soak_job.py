"""The training of a soak: soak_job.py FOLDER EPOCHS. Its weights count how often each batch was trained on.

Batch b is row b of the unit matrix, and the gradient of row b of each kernel is -1 for it. The learning rate
is the number of ranks, which cancels the average. So each batch adds 1 to its rows, on any number of ranks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk

BATCHES, UNITS, LAYERS = 240, 500, 4


class SaysThatItTrains(keras.callbacks.Callback):
    """Touches FOLDER/ranks/PID after the first step and each epoch."""

    reads_weights = stops_training = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._sign, self._begun = folder / "ranks" / str(os.getpid()), False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._begun:
            self._begun = True
            self._sign.touch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._sign.touch()


def main() -> None:
    """Train as one rank, and print how often each batch was trained on."""
    folder, epochs = Path(sys.argv[1]), int(sys.argv[2])
    hvpipe.init()
    inputs = keras.Input((BATCHES,))
    dense = [keras.layers.Dense(UNITS, use_bias=False, kernel_initializer="zeros") for _ in range(LAYERS)]
    model = keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in dense]))
    model.compile(keras.optimizers.SGD(float(hvpipe.size())), lambda y, made: -keras.ops.sum(made, axis=-1))
    model = hk.data_parallel(model, bucket_bytes=500_000)
    hk.on_resize(lambda change: setattr(model.optimizer, "learning_rate", float(change.size)))
    unit = np.eye(BATCHES, dtype=np.float32)[:, None, :]
    data = hk.shard(tf.data.Dataset.from_tensor_slices((unit, np.zeros((BATCHES, 1, 1), np.float32))))
    callbacks = [hk.Checkpoint(folder / "checkpoints", every="5s", keep=2), SaysThatItTrains(folder)]
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    weights = np.stack([kernel.numpy() for kernel in model.trainable_variables])
    np.save(folder / f"weights-{hvpipe.rank()}.npy", weights)


if __name__ == "__main__":
    main()
