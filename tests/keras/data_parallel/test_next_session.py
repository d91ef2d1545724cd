"""An optimizer after shutdown() and another init()."""

from __future__ import annotations

from pathlib import Path

from distributed import launch

SCRIPT = """
import keras, numpy as np, tensorflow as tf
import hvpipe
import hvpipe.horovod.tensorflow.keras as hvd

hvpipe.init()
x = np.ones((4, 1), "float32")

def compiled(optimizer):
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), dense])
    model.compile(optimizer, loss=lambda y, p: tf.reduce_mean(p))
    return model

def fit(model):
    model.fit(x * (hvd.rank() + 1), x, batch_size=4, verbose=0)
    return float(model.get_weights()[0][0, 0])

model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
assert fit(model) == -1.5
hvd.shutdown()
hvd.init()
other = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
assert fit(other) == -1.5
try:
    fit(model)
except tf.errors.InternalError as error:
    assert "compile models again" in str(error), error
else:
    raise AssertionError("the graph of the session before has trained")
model.compile(model.optimizer, loss=model.loss)
assert fit(model) == -3.0
print(f"rank {hvd.rank()} has trained", flush=True)
"""


def test_an_optimizer_goes_on_once_its_model_is_compiled_again(tmp_path: Path) -> None:
    """Regression: it could never train again, or used the plan of another model."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = launch(2, [script], limit_s=120, env={"HVPIPE_TIMEOUT": "30"})
    assert result.returncode == 0, result.describe()
    assert {"rank 0 has trained", "rank 1 has trained"} <= set(result.output.splitlines())
