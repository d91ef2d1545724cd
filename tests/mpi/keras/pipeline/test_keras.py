"""A pipeline behaves like any Keras model: methods, callbacks, precision, and errors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras.pipeline.callbacks import without_duplicates
from hvpipe.keras.pipeline.rank_driver import RankDriver
from hvpipe.session import current
from pipelines import batches, both, compile_as_all, mlp, sgd, small


@functools.cache
def trained_before() -> Any:
    """Return a pipeline for cases that do not depend on its weights. Its steps are traced once for all."""
    return compile_as_all(hk.pipeline_parallel(small))


def one_in_a_list() -> keras.Model:
    inputs = keras.Input((12,))
    return keras.Model(inputs, [keras.layers.Dense(4)(keras.layers.Dense(8)(inputs))])


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("build", [small, one_in_a_list])
def test_on_batch_methods_are_those_of_keras(build: Any) -> None:
    x, y = batches(mlp, 16)

    def told(model: Any) -> list[float]:
        compile_as_all(model)
        found = model.predict_on_batch(x)
        assert isinstance(found, np.ndarray)
        trained = model.train_on_batch(x, y, sample_weight=np.linspace(0, 1, 16))
        tested = model.test_on_batch(x, y, return_dict=True)
        return [*found.ravel(), *trained, *(tested[name] for name in sorted(tested))]

    expected, found = both(build, told)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_arguments_may_be_positional() -> None:
    x, y = batches(mlp, 16)
    seen: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    pipe = trained_before()
    pipe.fit(x, y, 8, 2, 0, [callback])
    assert seen == [0, 1]
    assert len(pipe.evaluate(x, y, 8, 0)) == 2
    assert pipe.predict(x, 8, 0).shape == (16, 4)


class StopsOnTheLastRank(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and hvpipe.rank() == hvpipe.size() - 1:
            self.model.stop_training = True


@pytest.mark.older_tensorflow
def test_a_callback_that_stops_one_rank_within_an_epoch_stops_all() -> None:
    x, y = batches(mlp, 32)
    pipe = trained_before()
    before = int(pipe.optimizer.iterations)
    history = pipe.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[StopsOnTheLastRank()])
    assert len(history.history["loss"]) == 1
    assert int(pipe.optimizer.iterations) == before + 2


def test_callbacks_may_monitor_a_metric_of_the_last_stage() -> None:
    """Regression guard: on other ranks Keras could not tell whether more is better."""
    x, y = batches(mlp, 16)
    pipe = hk.pipeline_parallel(small)
    pipe.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping("val_accuracy", patience=0, min_delta=2.0)
    history = pipe.fit(x, y, batch_size=8, epochs=3, verbose=0, validation_data=(x, y), callbacks=[stop])
    assert len(history.history["val_accuracy"]) == 2


def test_one_rank_writes_a_log_that_all_ranks_share(tmp_path: Path) -> None:
    x, y = batches(mlp, 16)
    shared = hvpipe.broadcast_object(str(tmp_path / "log.csv"))
    pipe = trained_before()
    options = {"batch_size": 8, "verbose": 0}
    for first, end in ((0, 2), (2, 3)):
        files = [
            keras.callbacks.CSVLogger(shared, append=True),
            keras.callbacks.CSVLogger(tmp_path / "own.csv"),
        ]
        pipe.fit(x, y, epochs=end, initial_epoch=first, callbacks=files, **options)
    hvpipe.barrier()
    rows = Path(shared).read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1", "2"]
    assert (tmp_path / "own.csv").read_text().splitlines()[-1] == rows[-1]


def with_a_table() -> keras.Model:
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(7, 4, name="table")(tokens))
    return keras.Model(tokens, keras.layers.Dense(4)(keras.layers.Dense(4)(x)))


def test_one_rank_writes_and_prints_for_all() -> None:
    """If a TensorBoard shows weights, every rank writes its own, because each rank holds some."""
    pipe = compile_as_all(hk.pipeline_parallel(with_a_table))
    rank, size = hvpipe.rank(), hvpipe.size()
    callbacks = [
        keras.callbacks.TensorBoard("scalars"),
        keras.callbacks.TensorBoard("weights", histogram_freq=1),
        keras.callbacks.TensorBoard(f"own{rank}"),
        keras.callbacks.RemoteMonitor(),
        keras.callbacks.EarlyStopping("loss", verbose=1),
    ]
    for _ in ("first fit", "another"):
        found = without_duplicates(current(), callbacks, pipe.stages, pipe.layers)
        assert [c.log_dir for c in found if isinstance(c, keras.callbacks.TensorBoard)] == (
            ["scalars", "weights", "own0"] if rank == 0 else [f"weights/rank{rank}", f"own{rank}"]
        )
        assert [c.verbose for c in found if isinstance(c, keras.callbacks.EarlyStopping)] == [rank == 0]
        assert len(found) == (5 if rank == 0 else 3)
    assert len(set(hvpipe.allgather_object(tuple(c.log_dir for c in callbacks[1:3])))) == size


def test_embeddings_of_other_ranks_are_no_error() -> None:
    pipe = compile_as_all(hk.pipeline_parallel(with_a_table))
    given = {"table": "names.tsv", "no_layer": "names.tsv"}
    board = keras.callbacks.TensorBoard("logs", embeddings_freq=1, embeddings_metadata=given)
    without_duplicates(current(), [board], pipe.stages, pipe.layers)
    first = hvpipe.rank() == 0
    assert board.embeddings_metadata == (given if first else {"no_layer": "names.tsv"})
    assert board.log_dir == ("logs" if first else f"logs/rank{hvpipe.rank()}")


def test_a_callback_that_reads_or_sets_weights_on_only_one_rank_is_an_error(tmp_path: Path) -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 8)
    pipe = compile_as_all(hk.pipeline_parallel(small))
    for callback in (
        keras.callbacks.ModelCheckpoint(str(tmp_path / "model.keras")),
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        keras.callbacks.SwapEMAWeights(),
    ):
        on_one = [callback] if hvpipe.rank() == 0 else []
        wanted = rf"give {type(callback).__name__}\S* to all .* 1 on rank 0 and 0 on rank 1"
        with pytest.raises(MismatchError, match=wanted):
            pipe.fit(x, y, batch_size=8, verbose=0, callbacks=on_one)


def test_each_structure_of_targets_builds_graphs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training has class weights and validation has none. Targets come in several lengths."""
    made: list[Any] = []
    own = RankDriver.__init__

    def counting(driver: Any, *args: Any, **kwargs: Any) -> None:
        made.append(driver)
        own(driver, *args, **kwargs)

    monkeypatch.setattr(RankDriver, "__init__", counting)
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(small))
    pipe.fit(x, y, batch_size=8, epochs=3, verbose=0, class_weight={0: 2.0}, validation_data=(x, y))
    assert len(made) == 2

    def losses(model: Any) -> list[float]:
        model.compile(sgd(), "mse")
        lengths = (5, 6, 7, 9, 6)
        return [model.train_on_batch(np.ones((8, n, 3)), np.ones((8, n, 4))) for n in lengths]

    expected, found = both(of_any_length, losses)
    assert len(made) == 4
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def of_any_length() -> keras.Model:
    return keras.Sequential([keras.Input((None, 3)), *(keras.layers.Dense(4) for _ in range(4))])


def masked_of_any_length() -> keras.Model:
    tokens = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(9, 4, mask_zero=True)(tokens)
    for _ in range(3):
        x = keras.layers.Dense(4, activation="tanh")(x)
    return keras.Model(tokens, x)


def of_length(build: Any, steps: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng([steps, seed])
    tokens = rng.integers(1, 9, (8, steps))
    tokens[:3, 3:] = 0
    x = tokens if build is masked_of_any_length else rng.normal(size=(8, steps, 3))
    return x, rng.normal(size=(8, steps, 4))


@pytest.mark.parametrize("build", [of_any_length, masked_of_any_length])
def test_targets_have_the_sizes_of_rank_0s_batches(build: Any) -> None:
    """The sizes of rank 0's batches count. Each rank's own batches sometimes have the same lengths."""
    told = []
    for parallel in (False, True):
        keras.utils.set_random_seed(5)
        model = hk.pipeline_parallel(build, microbatches=4) if parallel else build()
        model.compile(sgd(), "mse")
        rank = hvpipe.rank() if parallel else 0
        given = [of_length(build, steps, rank) for steps in ((5, 6, 7) if rank == 0 else (5, 5, 6))]
        told.append([run(*batch) for run in (model.train_on_batch, model.test_on_batch) for batch in given])
    np.testing.assert_allclose(told[1], told[0], rtol=1e-5)


def test_inputs_of_another_shape_are_refused_as_keras_does() -> None:
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(small))
    with pytest.raises(ValueError, match=r"expected shape=\(None, 12\), found shape=\(8, 5\)"):
        pipe.fit(x[:, :5], y, batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("differs", "says"),
    [
        ({"y": np.zeros(16, np.float32)}, "y of float32 with 1 axis"),
        ({"y": np.zeros((16, 1), np.int32)}, "y of int32 with 2 axes"),
        (
            {"class_weight": {0: 2.0}},
            "y of int32 with 1 axis, sample_weight of float32 with 1 axis",
        ),
        ({"y": {"label": np.zeros(16, np.int32)}}, "y/label of int32 with 1 axis"),
        ({"y": None}, "no targets"),
    ],
)
def test_targets_that_differ_on_one_rank_are_an_error(differs: dict[str, Any], says: str) -> None:
    """Otherwise this rank would misread the targets that the first stage's rank sends."""
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 16)
    last = hvpipe.size() - 1
    given = {"y": y.astype(np.int32), **(differs if hvpipe.rank() == last else {})}
    pipe = compile_as_all(hk.pipeline_parallel(small))
    both = f"Received: y of int32 with 1 axis on rank 0 and {says} on rank {last}"
    with pytest.raises(MismatchError, match=f"training step .* {both}"):
        pipe.fit(x, batch_size=8, verbose=0, **given)
    # The ranks are still in step.
    assert hvpipe.allgather_object(hvpipe.rank()) == list(range(hvpipe.size()))


def test_fewer_inputs_than_targets_are_an_error() -> None:
    """Otherwise the pipeline would use the first targets."""
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(small))
    with pytest.raises(HvpipeError, match=r"number of samples. Received: \[8\] of inputs, \[16\] of targets"):
        pipe.train_on_batch(x[:8], y)


def test_the_error_of_export_says_what_to_do() -> None:
    with pytest.raises(HvpipeError, match=r"load_model\(.*\)\.export"):
        hk.pipeline_parallel(small).export("folder")


def test_the_error_of_keras_save_model_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HvpipeError, match=r"pipe\.save\('model.keras'\) on all ranks"):
        keras.saving.save_model(hk.pipeline_parallel(small), tmp_path / "model.keras")


def test_callbacks_may_be_a_keras_callback_list() -> None:
    x, y = batches(mlp, 32)
    pipe = trained_before()
    given = keras.callbacks.CallbackList([StopsOnTheLastRank()], add_history=True)
    history = pipe.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=given)
    assert len(history.history["loss"]) == 1


def test_targets_of_another_dtype_on_one_rank_are_an_error_in_evaluation() -> None:
    if hvpipe.size() == 1:
        pytest.skip("one rank agrees with itself")
    x, y = batches(mlp, 16)
    pipe = compile_as_all(hk.pipeline_parallel(small))
    dtype = np.int32 if hvpipe.rank() == 0 else np.int64
    with pytest.raises(MismatchError, match=r"evaluation step .* y of int32 .* on rank 0 and y of int64"):
        pipe.evaluate(x, y.astype(dtype), batch_size=8, verbose=0)


class OwnStep(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {}


def with_own_step() -> keras.Model:
    inputs = keras.Input((12,))
    return OwnStep(inputs, keras.layers.Dense(4)(keras.layers.Dense(4)(inputs)))


def test_a_model_with_its_own_train_step_is_refused() -> None:
    with pytest.raises(HvpipeError, match=r"OwnStep .*, which defines train_step"):
        hk.pipeline_parallel(with_own_step)


def test_a_build_model_that_loads_weights_is_refused(tmp_path: Path) -> None:
    file, whole = tmp_path / "model.weights.h5", small()
    whole.save_weights(file)

    def by_file() -> keras.Model:
        model = small()
        model.load_weights(file)
        return model

    def by_value() -> keras.Model:
        model = small()
        model.layers[1].set_weights([np.ones((8, 8)), np.zeros(8)])
        return model

    for build, name in ((by_file, r"dense\w*/kernel"), (by_value, r"dense_\w*/kernel")):
        with pytest.raises(HvpipeError, match=rf"by load\(file\), .* a value for (\w*/)?{name}"):
            hk.pipeline_parallel(build)
    pipe = hk.pipeline_parallel(small)
    pipe.load(file)
    x, _ = batches(mlp, 8)
    np.testing.assert_allclose(pipe.predict(x, verbose=0), whole.predict(x, verbose=0), atol=1e-6)


class Coarse(keras.layers.Layer):
    """Holds layers that hvpipe cannot see."""

    def build(self, shape: Any) -> None:
        self.inner = [keras.layers.Dense(64) for _ in range(6)]
        for layer in self.inner:
            layer.build((None, 64))

    def call(self, x: Any) -> Any:
        for layer in self.inner:
            x = layer(x)
        return x


def coarse() -> keras.Model:
    steps = [keras.layers.Dense(64), Coarse(name="coarse"), keras.layers.Dense(4)]
    return keras.Sequential([keras.Input((12,)), *steps])


def test_the_layout_is_printed_once_with_a_layer_that_cannot_be_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, y = batches(mlp, 16)
    told = []
    for build in (coarse, small):
        pipe = compile_as_all(hk.pipeline_parallel(build, microbatches=2))
        for verbose in (0, 2, 2):
            capsys.readouterr()
            pipe.fit(x, y, batch_size=16, verbose=verbose)
            told.append([line for line in capsys.readouterr().out.splitlines() if "loss: " not in line])
    if hvpipe.rank() > 0:
        assert told == [[]] * 6
        return
    silent, first, again, *_, of_small, last = told
    stages = len(pipe.stages.cuts) if hvpipe.size() == 2 else min(hvpipe.size(), 3)
    assert [silent, again, last] == [[], [], []]
    assert "stages on" in first[0] or stages == 1
    assert first[1].split() == ["stage", "rank", "host", "layers", "weights", "computing", "memory"]
    assert [line.split()[:2] for line in first[2 : 2 + stages]] == [[str(s)] * 2 for s in range(stages)]
    assert not any("warning" in line for line in of_small)
    if stages > 1:
        assert "'coarse' has 9" in first[-1]
        assert "Coarse is one layer to Keras" in first[-1]


def compiled(optimizer: Any = "adam") -> keras.Model:
    """Compile the model, as many functions that build one do."""
    model = small()
    optimizer = keras.optimizers.Nadam(0.02) if optimizer is None else optimizer
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="own")]
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    model.optimizer.learning_rate = 0.03
    return model


@pytest.mark.parametrize("optimizer", ["adam", None])
def test_a_pipeline_takes_what_build_model_compiled_unless_it_is_told(optimizer: Any) -> None:
    """Regression guard: an optimizer makes variables from values, which was refused."""
    x, y = batches(mlp, 16)

    def trained(model: Any) -> dict[str, list[float]]:
        if hasattr(model, "stages"):
            model.compile()
        found: dict[str, list[float]] = model.fit(x, y, 8, 2, 0, shuffle=False).history
        return found

    expected, found = both(functools.partial(compiled, optimizer), trained)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    pipe = hk.pipeline_parallel(compiled)
    for use in (pipe.fit, pipe.evaluate, pipe.train_on_batch):
        with pytest.raises(HvpipeError, match=r"build_model has compiled the model: call `pipe.compile\(\)`"):
            use(x, y)
    pipe.compile("sgd", "mse")
    assert isinstance(pipe.optimizer, keras.optimizers.SGD)
    own = hk.pipeline_parallel(trained_alone())
    own.compile()
    assert isinstance(own.optimizer, keras.optimizers.Adam)
    assert not own.optimizer.built


def trained_alone() -> keras.Model:
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    return model


class FromValue(keras.layers.Layer):
    """Makes its variable from a value."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = keras.Variable(np.linspace(0, 1, 8, dtype=np.float32))

    def call(self, x: Any) -> Any:
        return x + self.offset


def with_values() -> keras.Model:
    steps = [layer for _ in range(3) for layer in (keras.layers.Dense(8), FromValue())]
    return keras.Sequential([keras.Input((12,)), *steps])


def test_variables_made_from_values_have_them_on_the_ranks_that_hold_them() -> None:
    x, _ = batches(mlp, 8)
    expected, found = both(with_values, lambda model: model.predict(x, verbose=0))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def a_model_that_was_called() -> keras.Model:
    """Return a model that was called.

    It also builds a second model, which it drops after setting its weights.
    """
    other = small()
    other.set_weights(other.get_weights())
    model = small()
    model(np.zeros((2, 12)))
    return model


def test_build_model_may_call_the_model() -> None:
    hk.pipeline_parallel(a_model_that_was_called)


def tied_by_a_function() -> keras.Model:
    """Build a model whose last operation reads the first layer's table."""
    tokens = keras.Input((5,), dtype="int32")
    table = keras.layers.Embedding(7, 4, name="table")
    x = table(tokens)
    for _ in range(3):
        x = keras.layers.Dense(4)(x)
    tie = keras.layers.Lambda(lambda h: h @ keras.ops.transpose(table.embeddings.value))
    return keras.Model(tokens, tie(x))


@pytest.mark.parametrize("whole", [False, True])
def test_reading_weights_of_another_stage_is_an_error(whole: bool) -> None:
    """They would get no gradient from that use, and would keep this rank's initial values."""
    model = tied_by_a_function() if whole else tied_by_a_function
    pipe = compile_as_all(hk.pipeline_parallel(model))
    x, y = np.zeros((8, 5), np.int32), np.zeros((8, 5), np.int32)
    if hvpipe.size() == 1:
        assert len(pipe.fit(x, y, batch_size=8, verbose=0).history["loss"]) == 1
        return
    last = f"(?s)rank {hvpipe.size() - 1}: .*A stage should read only the weights of its own layers"
    with pytest.raises(HvpipeError, match=rf"{last}.* Received: table/embeddings, of another stage"):
        pipe.fit(x, y, batch_size=8, verbose=0)


def test_a_loss_may_only_read_weights_of_the_last_stage() -> None:
    model = small()
    first, last = model.layers[0], model.layers[-1]
    x, y = batches(mlp, 8)
    pipe = hk.pipeline_parallel(model)

    def loss_with(layer: Any) -> Any:
        return lambda y_true, y_pred: keras.ops.mean(y_pred**2) + keras.ops.sum(layer.kernel**2)

    pipe.compile(sgd(), loss_with(last))
    pipe.fit(x, y, batch_size=8, verbose=0)
    pipe.compile(sgd(), loss_with(first))
    if hvpipe.size() > 1:
        with pytest.raises(HvpipeError, match=r"Received: \S*kernel, of another stage"):
            pipe.fit(x, y, batch_size=8, verbose=0)
