"""A job with overlap="local" resumes on a different number of ranks from the mean of the ranks' weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from distributed import launch
from hvpipe.checkpoints import folder as folders
from hvpipe.checkpoints.manifest import read_manifest

# Stops after some batches. Weights show how often each sample was trained on, in how large batches.
COUNTING = """
import json, sys
import keras, numpy as np, tensorflow as tf
import hvpipe, hvpipe.keras as hk

class StopAt(keras.callbacks.Callback):
    reads_weights = stops_training = False
    left = int(sys.argv[2])

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        checkpoint._running.fit._writer.wait()
        if self.left == 0:
            raise KeyboardInterrupt

hvpipe.init()
SAMPLES = 12
layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
model = keras.Sequential([keras.Input((SAMPLES,)), layer])
model.compile(keras.optimizers.SGD(-1.0), lambda wanted, found: keras.ops.mean(found))
hk.data_parallel(model)
arrays = np.eye(SAMPLES, dtype=np.float32), np.zeros((SAMPLES, 1))
data = tf.data.Dataset.from_tensor_slices(arrays).batch(1)
checkpoint = hk.Checkpoint(sys.argv[1], every="1steps")
try:
    model.fit(hk.shard(data), epochs=2, verbose=0, callbacks=[checkpoint, StopAt()])
except KeyboardInterrupt:
    pass
else:
    if hvpipe.rank() == 0:
        print(json.dumps(model.get_weights()[0].ravel().tolist()), flush=True)
hvpipe.shutdown()
"""


def test_again_within_the_same_epoch(tmp_path: Path) -> None:
    """Regression: steps on 1 rank and on 2 were added up, and the next resume read over too many batches."""
    script, folder = tmp_path / "job.py", tmp_path / "run"
    script.write_text(COUNTING)
    saved = []
    for size, batches in ((1, 12 + 3), (2, 2), (2, -1)):
        result = launch(size, [script, str(folder), str(batches)], limit_s=240)
        assert result.returncode == 0, result.describe()
        saved.append(read_manifest(folders.complete(folder)[0]).position)
    assert [position.epoch for position in saved] == [1, 1, 2]
    before = saved[0].epoch_samples
    assert 0 < before < saved[1].epoch_samples
    (found,) = (json.loads(line) for line in result.output.splitlines() if line.startswith("["))
    rounds = (12 - before) // 2
    wanted = [1.0] * before + [1 / 2] * (2 * rounds) + [0.0] * (12 - before - 2 * rounds)
    np.testing.assert_allclose(np.array(found) - 1.0, wanted, rtol=0, atol=1e-6)


SCRIPT = """
import json, sys
import keras, numpy as np, tensorflow as tf
import hvpipe, hvpipe.keras as hk

class StopAt(keras.callbacks.Callback):
    reads_weights = stops_training = False

    def __init__(self, batches, checkpoint):
        super().__init__()
        self.left, self.checkpoint = batches, checkpoint

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.checkpoint._running.fit._writer.wait()
            raise KeyboardInterrupt

hvpipe.init()
folder, batches = sys.argv[1], int(sys.argv[2])
keras.utils.set_random_seed(5)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
# From step 4 on, steps change nothing: weights show what they were resumed from.
rate = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.0])
model.compile(keras.optimizers.SGD(rate), "mse")
hk.data_parallel(model, "local", every=4, fragments=2, warmup_steps=0)
random = np.random.default_rng(3)
data = tf.data.Dataset.from_tensor_slices((random.normal(size=(96, 6)), random.normal(size=(96, 2)))).batch(2)
checkpoint = hk.Checkpoint(folder, every="4steps")
try:
    model.fit(hk.shard(data), verbose=0, callbacks=[checkpoint, StopAt(batches, checkpoint)])
except KeyboardInterrupt:
    pass
else:
    if hvpipe.rank() == 0:
        print(json.dumps([array.tolist() for array in model.get_weights()]), flush=True)
hvpipe.shutdown()
"""


def test_from_two_ranks_to_three(tmp_path: Path) -> None:
    script, folder = tmp_path / "job.py", tmp_path / "run"
    script.write_text(SCRIPT)

    def job(size: int, batches: int) -> str:
        result = launch(size, [script, str(folder), str(batches)], limit_s=240)
        assert result.returncode == 0, result.describe()
        return str(result.output)

    job(2, 5)
    (checkpoint,) = (path.parent for path in folder.glob("*/manifest.json"))
    own: list[list[Any]] = []
    for rank in range(2):
        with np.load(checkpoint / f"rank-{rank}.npz") as arrays:
            own.append([arrays[f"own/weights/{i}"] for i in range(2)])
            assert "own/round/average/1" in arrays  # of the bias; the kernel's has come
    assert (own[0][0] != own[1][0]).any()
    (found,) = (json.loads(line) for line in job(3, -1).splitlines() if line.startswith("[["))
    for array, mine in zip(found, zip(*own, strict=True), strict=True):
        np.testing.assert_allclose(array, np.mean(mine, axis=0), rtol=0, atol=1e-6)
