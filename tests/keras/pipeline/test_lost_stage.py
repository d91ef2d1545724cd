"""A stage's rank is killed: the pipeline goes on without it from its last checkpoint, to the same weights."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distributed import Run, run
from once import once_for_all_workers

# The job, and the same training in one process: job.py FOLDER HOW [KILLED STEP]
SCRIPT = """
import json, os, signal, sys, time
import keras, numpy as np, tensorflow as tf
import hvpipe, hvpipe.keras as hk

EPOCHS, BATCHES, CLASSES = 4, 12, 4
folder, how, *kill = sys.argv[1:]

def build():
    inputs = keras.Input((16, 16, 1))
    x = keras.layers.Conv2D(8, 3, activation="relu")(inputs)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Conv2D(16, 3, activation="relu")(x)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(32, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(x))

class Killer(keras.callbacks.Callback):
    reads_weights = stops_training = False
    steps = 0

    def on_train_batch_begin(self, batch, logs=None):
        if kill and self.steps == int(kill[1]) and hvpipe.size() == 3 and hvpipe.rank() == int(kill[0]):
            time.sleep(0.3)  # the others are in the middle of the step then
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

# Squares of four sizes in noise.
rng = np.random.default_rng(3)
y = rng.integers(0, CLASSES, 16 * BATCHES)
x = 0.3 * rng.normal(size=(len(y), 16, 16, 1)).astype("float32")
for picture, label in zip(x, y):
    picture[2 : 5 + 3 * label, 2 : 5 + 3 * label] += 1
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(1000, seed=1).batch(16)

keras.utils.set_random_seed(5)
if how == "alone":
    model, callbacks = build(), []
else:
    hvpipe.init()
    hk.on_resize(lambda change: print("RANKS", change.old_size, change.size, flush=True))
    options = {"stages": {"stages": 3, "microbatches": 4}, "replicas": {"replicas": (2, 1)}}[how]
    model = hk.pipeline_parallel(build, **options)
    callbacks = [hk.Checkpoint(f"{folder}/{how}", every=5), Killer()]
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=callbacks)
found = model.evaluate(data, verbose=0)
steps = int(model.optimizer.iterations)
if how != "alone":
    model.save_weights(f"{folder}/{how}.weights.h5")
    if hvpipe.rank() > 0:
        sys.exit()
    model = build()
    model.load_weights(f"{folder}/{how}.weights.h5")
np.savez(f"{folder}/{how}.npz", *model.get_weights())
print("FOUND", json.dumps({"accuracy": found[1], "steps": steps}), flush=True)
"""


def found(result: Run, folder: Path, how: str) -> tuple[dict[str, Any], list[Any]]:
    assert result.returncode == 0, result.describe()
    (line,) = re.findall(r"^FOUND (.*)$", result.output, re.MULTILINE)
    return json.loads(line), list(np.load(folder / f"{how}.npz").values())


def job(folder: Path, how: str, *options: str, kill: tuple[int, int]) -> Run:
    script = folder / "job.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "hvpipe", "run", "--elastic", "--no-summary", "-np", "3", *options]
    return run([*command, str(script), str(folder), how, *map(str, kill)], limit_s=300)


@pytest.fixture(scope="module")
def trained_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train the same model in one process. Return the folder with its weights."""

    def train(folder: Path) -> None:
        (folder / "job.py").write_text(SCRIPT)
        found(
            run([sys.executable, str(folder / "job.py"), str(folder), "alone"], limit_s=300), folder, "alone"
        )

    return once_for_all_workers(tmp_path_factory, "alone", train)


LOST = "The remaining ranks could not save the last step."
SAVED = "The remaining ranks have all stages, and wrote a checkpoint of step 18."


@pytest.mark.parametrize(
    ("how", "killed", "told_of_loss", "again"),
    [("stages", 1, LOST, "3 finished steps"), ("replicas", 0, SAVED, "no finished step")],
)
def test_the_others_go_on(
    tmp_path: Path, how: str, killed: int, told_of_loss: str, again: str, trained_alone: Path
) -> None:
    result = job(tmp_path, how, kill=(killed, 18))
    told, weights = found(result, tmp_path, how)
    assert f"rank {killed} of 3 was lost in step 19. {told_of_loss}" in result.output, result.describe()
    assert f"and repeats {again}." in result.output, result.describe()
    assert "the job goes on with 2 ranks" in result.output, result.describe()
    assert "planned anew for 2 ranks, with 2 stages" in result.output, result.describe()
    assert "training resumes from" in result.output, result.describe()
    assert "RANKS 3 2" in result.output, result.describe()
    assert told["steps"] == 48
    assert told["accuracy"] > 0.95
    wanted = np.load(trained_alone / "alone.npz").values()
    for mine, theirs in zip(weights, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-4)


def test_too_few_ranks(tmp_path: Path) -> None:
    result = job(tmp_path, "stages", "--min-np", "3", kill=(2, 7))
    assert result.returncode == 69, result.describe()
    assert "2 ranks are left, and --min-np asks for 3" in result.output, result.describe()
    assert "goes on" not in result.output
    assert re.search(r"Rank 2 on .* ended first, having begun 7 steps, without a word", result.output)
