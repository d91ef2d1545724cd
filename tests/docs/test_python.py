"""The Python in README and docs runs as written, on two ranks, without a network."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed import ALONE, launch

ROOT = Path(__file__).parents[2]

# Names that a page takes as given.
MODEL_AND_DATA = """
import keras
import numpy as np
import tensorflow as tf
import hvpipe
import hvpipe.keras as hk

hvpipe.init()
keras.utils.set_random_seed(0)
x, y = np.random.rand(512, 8).astype("float32"), np.random.randint(0, 4, 512)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def build_model():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(6), keras.layers.Dense(4)])

model = build_model()
"""
A_STEP = """
step(x, y)

averaging = hk.DistributedOptimizer(keras.optimizers.SGD(0.1))

@tf.function
def update():
    averaging.apply([tf.ones_like(w) for w in model.trainable_variables], model.trainable_variables)

update()
"""
# What a newcomer takes for a fault: TensorFlow without a GPU, Keras about datasets, AutoGraph about mpi4py.
ALARMS = ("cuInit", "shuffle=True", "AutoGraph")
TOGETHER = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path, run_name="__main__")
"""


def script(path: Path, page: str, begins: str, before: str = "", after: str = "") -> Path:
    """Write a script with the one Python block of a page that contains a line starting with `begins`."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (b for b in blocks if re.search(f"^ *{re.escape(begins)}", b, re.MULTILINE))
    path.write_text(before + block + after)
    return path


@pytest.mark.older_tensorflow
def test_examples_train(tmp_path: Path) -> None:
    """Run all in one job, because TensorFlow starts slowly."""
    pipe, loop = "pipe = hk.pipeline_parallel(", "tape = hk.DistributedGradientTape("
    moved = "model = hk.data_parallel(model)\n# data of"
    data = "data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)\n"
    saved = "    import os\n    os.rename('model.keras', 'first.keras')\n    print('first is done')\n"
    parts = [
        script(tmp_path / "first.py", "README.md", "model = hk.data_parallel(", after=saved),
        script(tmp_path / "pipe.py", "README.md", pipe, MODEL_AND_DATA),
        script(tmp_path / "loop.py", "docs/data-parallel.md", loop, MODEL_AND_DATA, after=A_STEP),
        script(tmp_path / "moved.py", "docs/from-horovod.md", moved, MODEL_AND_DATA + data),
    ]
    counted = "    print('the page ran', int(pipe.optimizer.iterations), 'steps')\n"
    pipelines = of_the_page_on_pipelines(tmp_path, after=counted)
    together = tmp_path / "together.py"
    together.write_text(TOGETHER)
    unset = {"TF_CPP_MIN_LOG_LEVEL": "0"}  # by default
    result = launch(2, [together, *parts, pipelines], limit_s=200, cwd=tmp_path, env=unset)
    assert result.returncode == 0, result.describe()
    assert not [alarm for alarm in ALARMS if alarm in result.output], result.describe()
    assert result.output.split("first is done")[0].count("Epoch 3/3") == 1, result.describe()
    assert (tmp_path / "first.keras").is_file()
    assert (tmp_path / "model.keras").is_file()
    assert result.output.count("the page ran 12 steps") == 2, result.describe()


def of_the_page_on_pipelines(folder: Path, after: str = "") -> Path:
    path = script(folder / "train.py", "docs/model-parallel.md", "pipe = hk.pipeline_parallel(", after=after)
    path.write_text(path.read_text().replace("2048", "64"))
    return path


def test_the_page_on_pipelines_can_be_profiled(tmp_path: Path) -> None:
    of_the_page_on_pipelines(tmp_path)
    options = ["--microbatch", "4", "--repeats", "1"]
    profiled = launch(
        ALONE, ["-m", "hvpipe", "profile", "train.py:build_model", *options], limit_s=200, cwd=tmp_path
    )
    assert profiled.returncode == 0, profiled.describe()
    assert "Epoch" not in profiled.output, profiled.describe()
    assert (tmp_path / "profile.json").is_file()
