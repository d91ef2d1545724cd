"""What counts as a sample: ranks are weighted by the number that the loss divides by."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from hvpipe.keras.data_parallel.samples import SamplesIn


class Graphs(keras.Model):
    """Trains a number towards the mean target of a batch's graphs; `x` has their edges, too."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.add_weight(shape=(1, 1), initializer="zeros", name="level")
        self.built = True

    def call(self, x: Any) -> Any:
        return x["graphs"] * self.level


class WithoutTargets(Graphs):
    """Has its targets in `x`."""

    def train_step(self, data: Any) -> Any:
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - x["targets"]) ** 2)
        self.optimizer.apply([*tape.gradient(loss, [self.level.value])], [self.level])
        return {"loss": loss}


def graph_batch(edges: int, graphs: int) -> dict[str, Any]:
    return {"edges": np.zeros((edges, 2), "int32"), "graphs": np.ones((graphs, 1), "float32")}


def edges_of(rank: int) -> int:
    return 40 if rank == 0 else 10


def level_after(model: keras.Model, *batch: Any, **options: Any) -> float:
    model.compile(keras.optimizers.SGD(1.0), "mse")
    hk.data_parallel(model, **options).fit(tf.data.Dataset.from_tensors(batch), verbose=0)
    return float(model.level.numpy()[0, 0])


def compiled(loss: Any, names: tuple[str, ...] = ("a", "b")) -> keras.Model:
    x = keras.Input((2,))
    outputs = {name: keras.layers.Dense(1, name=name)(x) for name in names}
    model = keras.Model(x, list(outputs.values()))
    model.compile("sgd", loss)
    return model


def test_which_axis_counts() -> None:
    def rows(n: int) -> Any:
        return tf.zeros((n, 2))

    ragged = tf.RaggedTensor.from_row_lengths(tf.range(6), [1, 2, 3])
    sparse = tf.sparse.from_dense(np.eye(4))
    a, b = rows(5), rows(6)
    for loss, batch, wanted in (
        ("mse", (rows(3), rows(4)), 4),
        ("mse", (rows(3), ragged), 3),
        ("mse", (rows(3), None, rows(7)), 7),
        ("mse", (rows(3), 1.0), 3),
        ("mse", (rows(3),), 3),
        ("mse", {"x": rows(3), "more": {"inside": rows(3)}}, 3),
        ("mse", ([sparse, rows(4)],), 4),
        ("mse", (rows(2), rows(2), rows(2), rows(2)), 2),
        ("mse", keras.utils.pack_x_y_sample_weight([rows(2), rows(2)]), 2),
        ("mse", (tf.constant(1.0),), 1),
        ("mse", (rows(3), (a, b)), 5),
        ([None, "mse"], (rows(3), (a, b)), 6),
        ({"b": "mse"}, (rows(3), {"a": a, "b": b}), 6),
        ({"b": "mse", "a": "mse"}, (rows(3), (a, b)), 6),
        (None, (rows(3), {"b": b, "a": rows(6)}), 6),
    ):
        assert int(SamplesIn(compiled(loss))(batch)) == wanted, (loss, batch)
    count = SamplesIn(compiled("mse"))
    with pytest.raises(HvpipeError, match=r"if no compiled loss uses them.*axes of length \[5, 6\]"):
        SamplesIn(compiled(None))((rows(3), {"b": b, "a": a}))
    several = ([sparse, rows(3)],)
    with pytest.raises(HvpipeError, match=r"axes of length \[3, 4\]"):
        count(several)
    assert int(SamplesIn(compiled("mse"), strict=False)(several)) == 4
    open_axes = tf.function(count, input_signature=[([tf.TensorSpec([None, 2])] * 2,)])
    assert int(open_axes(([rows(3), rows(3)],))) == 3
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"samples= to data_parallel.*\[3 4\]"):
        open_axes(([rows(3), rows(4)],))


@pytest.mark.every_size
@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:All ranks read the same")
def test_graphs_count_and_not_their_edges() -> None:
    size, rank = hvpipe.size(), hvpipe.rank()
    x, target = graph_batch(edges_of(rank), 8), 1.0 if rank == 0 else -1.0
    y = np.full((8, 1), target, "float32")
    # The gradient of a rank is -2 * target, and SGD(1.0) subtracts the mean.
    assert level_after(Graphs(), x, y) == pytest.approx(2 * (2 - size) / size)
    # A loss of the user's own may divide by something else.
    wanted = 2 * (40 - 10 * (size - 1)) / (40 + 10 * (size - 1))
    by_edges = level_after(Graphs(), x, y, samples=lambda batch: tf.shape(batch[0]["edges"])[0])
    assert by_edges == pytest.approx(wanted)
    x["targets"] = y
    found = level_after(WithoutTargets(), x, samples=lambda batch: batch[0]["edges"].shape[0])
    assert found == pytest.approx(wanted)
    if size > 1:  # one rank weights nothing
        with pytest.raises(HvpipeError, match=rf"samples=.*Received: axes of length \[8, {edges_of(rank)}\]"):
            level_after(WithoutTargets(), x)
    with pytest.raises(HvpipeError, match=r"one number.*Received: an array of shape \(2,\)"):
        level_after(Graphs(), x, y, samples=lambda batch: [1, 2])
    with pytest.raises(HvpipeError, match=r"a function of a batch, or None\. Received: samples=3"):
        hk.data_parallel(Graphs(), samples=3)


def test_copies_have_all_options() -> None:
    """Regression: a copy counted samples in its own way."""
    again = vars(hk.data_parallel(Graphs(), samples=len))["_hvpipe_again"]
    # A link has become other options.
    assert {"model", "link", *again.keywords} == set(inspect.signature(hk.data_parallel).parameters)
    assert again.keywords["samples"] is len


def test_only_batches_that_are_equal_as_a_whole_cause_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    """Regression: an attention mask of ones, equal on all ranks, was taken for the same data."""
    inputs = {"attention_mask": keras.Input((2,)), "words": keras.Input((2,))}
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs["attention_mask"] * inputs["words"]))
    model.compile("sgd", "mse")
    hk.data_parallel(model)
    words = np.full((4, 2), float("inf"), "float32")
    words[0] = hvpipe.rank()
    x = {"attention_mask": np.full((4, 2), 1e30, "float32"), "words": words}
    model.fit(x, np.ones((4, 1)), verbose=0)
    assert not [w for w in recwarn if "read the same first batch" in str(w.message)]
