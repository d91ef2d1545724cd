"""DistributedOptimizer and DistributedGradientTape in custom training loops, eager and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.horovod.tensorflow as hvd
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError, MismatchError
from hvpipe.keras import variables
from hvpipe.session import current
from training import (
    BUCKET_BYTES,
    FEATURES,
    all_batches,
    assert_close,
    assert_same_bits,
    assert_same_on_all_ranks,
    by_rank_0,
    compiled,
    fit,
    loss,
    mlp,
    my_batches,
    parallel,
    state_of,
)

STEPS = 6


def train(
    model: keras.Model,
    batches: tf.data.Dataset,
    compile_step: bool,
    tape: Callable[[Any], Any] = lambda tape: tape,
) -> dict[str, np.ndarray]:
    """Run a typical custom training loop. `tape` wraps the gradient tape."""
    criterion = loss()

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as own:
            value = criterion(y, model(x, training=True))
        gradients = tape(own).gradient(value, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(step) if compile_step else step
    for x, y in batches:
        run(x, y)
    return state_of(model)


def sgd(clipnorm: float | None = None) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=clipnorm)


@functools.cache
def reference(clipnorm: float | None = None) -> dict[str, np.ndarray]:
    """Return the state of one rank that trains on the batches of all."""
    found: dict[str, np.ndarray] = by_rank_0(
        lambda: train(compiled(mlp, sgd(clipnorm)), all_batches(STEPS), compile_step=True)
    )
    return found


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("compile_step", [False, True], ids=["eager", "compiled"])
def test_distributed_optimizer(compile_step: bool) -> None:
    model = compiled(mlp, sgd(clipnorm=0.5))
    wrapped = hk.DistributedOptimizer(model.optimizer, bucket_bytes=BUCKET_BYTES)
    assert wrapped is model.optimizer
    found = train(model, my_batches(STEPS), compile_step)
    assert_same_on_all_ranks(found)
    assert_close(found, reference(clipnorm=0.5), 1e-5)


@pytest.mark.older_tensorflow
@pytest.mark.parametrize("compile_step", [False, True], ids=["eager", "compiled"])
def test_distributed_tape(compile_step: bool) -> None:
    def averaging(tape: Any) -> Any:
        return hk.DistributedGradientTape(tape, bucket_bytes=BUCKET_BYTES)

    found = train(compiled(), my_batches(STEPS), compile_step, averaging)
    assert_same_on_all_ranks(found)
    assert_close(found, reference(), 1e-5)


def test_tape_as_context_keeps_structure_and_none() -> None:
    rank, size = hvpipe.rank(), hvpipe.size()
    used = tf.Variable([1.0, 2.0])
    unused = tf.Variable(3.0)
    with hk.DistributedGradientTape(tf.GradientTape()) as tape:
        value = tf.reduce_sum(used * float(rank))
    gradients = tape.gradient(value, {"used": used, "unused": unused})
    assert gradients["unused"] is None
    np.testing.assert_allclose(gradients["used"].numpy(), np.full(2, (size - 1) / 2), rtol=1e-6)


def test_gradients_survive_the_reduction_of_the_next_ones() -> None:
    """The gradients are views of the fused buffer, so the next step must not reuse that buffer."""
    variables = [tf.Variable(np.zeros(count, np.float32)) for count in (1, 17, 3)]
    kept = []
    for step in range(4):
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            value = tf.add_n([tf.reduce_sum(v) * (10.0 * step + hvpipe.rank()) for v in variables])
        kept.append(tape.gradient(value, variables))
    for step, gradients in enumerate(kept):
        mean = 10.0 * step + (hvpipe.size() - 1) / 2
        for variable, gradient in zip(variables, gradients, strict=True):
            np.testing.assert_allclose(gradient, np.full(variable.shape, mean))


@pytest.mark.parametrize("overlap", ["backward", "step"])
def test_an_optimizer_may_keep_the_gradients(overlap: str) -> None:
    """With `assign`, a variable shares the gradient's memory. It must still keep this step's gradient."""

    class Keeping(keras.optimizers.SGD):
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.kept = [self.add_variable_from_reference(v, "kept") for v in variables]

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            kept = self.kept[self._get_variable_index(variable)]
            variable.assign(variable - learning_rate * (gradient + 0.5 * kept))
            kept.assign(gradient)

    def trained(how: str) -> dict[str, np.ndarray]:
        model = compiled(mlp, Keeping(0.1))
        hk.data_parallel(model, overlap=how, bucket_bytes=BUCKET_BYTES)
        model.fit(my_batches(STEPS), verbose=0)
        return state_of(model)

    found = trained(overlap)
    assert_same_on_all_ranks(found)
    assert_same_bits(found, trained("none"))


@pytest.mark.parametrize("shape", [(4, 2), (5000, 64)], ids=["small", "sent by rows"])
def test_embedding_gradients_become_dense(shape: tuple[int, int]) -> None:
    table = tf.Variable(np.zeros(shape, np.float32))
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.gather(table, [hvpipe.rank() % 4, 0]))
    before = current().engine.counters()["bytes_sent"]
    gradient = hk.DistributedGradientTape(tape).gradient(value, [table])[0]
    assert current().engine.counters()["bytes_sent"] - before < 100_000
    expected = np.zeros(shape, np.float32)
    for rank in range(hvpipe.size()):
        expected[rank % 4] += 1 / hvpipe.size()
        expected[0] += 1 / hvpipe.size()
    np.testing.assert_allclose(tf.convert_to_tensor(gradient).numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_rows_give_the_bits_of_their_dense_table(dtype: str) -> None:
    """Rows come in any order, with repeats that may cancel out, and negative ones, which do not count."""
    noise = np.random.default_rng(hvpipe.rank())
    rows = noise.integers(-3, 40, 200) * 100
    values = noise.normal(size=(200, 64))
    rows[:2], values[1] = 4999, -values[0]
    tables = [tf.Variable(tf.zeros((5000, 64), dtype)) for _ in range(2)]
    slices = tf.IndexedSlices(tf.cast(values, dtype), tf.constant(rows), (5000, 64))
    both = zip([slices, tf.convert_to_tensor(slices)], tables, strict=True)
    found = [hk.average_gradients([gradient], [table])[0] for gradient, table in both]
    assert np.count_nonzero(found[0]) > 64
    assert np.array_equal(*(tf.bitcast(each, tf.uint8).numpy() for each in found))


@pytest.mark.parametrize("shape", [(50, 4), (5000, 64)], ids=["small", "sent by rows"])
def test_gradients_of_a_table_that_some_batches_do_not_use(shape: tuple[int, int]) -> None:
    """On some ranks and in some steps, the gradient is a dense tensor of zeros."""
    rank, size = hvpipe.rank(), hvpipe.size()
    table = tf.Variable(np.ones(shape, np.float32))
    for step in range(4):
        users = [(other + step) % 2 == 0 for other in range(size)]
        with hk.DistributedGradientTape(tf.GradientTape()) as tape:
            value = tf.reduce_sum(tf.gather(table, [step, 7])) if users[rank] else tf.constant(0.0)
        gradient = tape.gradient(value, [table], unconnected_gradients="zero")[0]
        expected = np.zeros(shape, np.float32)
        expected[[step, 7]] = sum(users) / size
        np.testing.assert_allclose(tf.convert_to_tensor(gradient).numpy(), expected, rtol=1e-6)


def test_an_optimizer_of_a_table_that_some_batches_do_not_use() -> None:
    table = keras.Variable(np.ones((5000, 64), np.float32))
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    rows = tf.IndexedSlices(tf.ones((2, 64)), tf.constant([3, 7]), (5000, 64))
    optimizer.apply([rows if hvpipe.rank() == 0 else tf.zeros((5000, 64))], [table])
    expected = np.ones((5000, 64), np.float32)
    expected[[3, 7]] -= 1 / hvpipe.size()
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-6)


def test_two_optimizers_in_one_compiled_step() -> None:
    """hvpipe orders the announcements of both optimizers.

    Otherwise ranks could announce in different orders.
    """

    def run(wrap: Callable[[Any], Any], batches: tf.data.Dataset) -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        models = [mlp(), mlp()]
        own = [wrap(keras.optimizers.SGD(0.1, momentum=0.9)) for _ in models]
        criterion = loss()

        @tf.function
        def step(x: Any, y: Any) -> None:
            for model, optimizer in zip(models, own, strict=True):
                with tf.GradientTape() as tape:
                    value = criterion(y, model(x, training=True))
                gradients = tape.gradient(value, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for x, y in batches:
            step(x, y)
        return [np.array(v.numpy()) for model in models for v in model.trainable_variables]

    found = run(hk.DistributedOptimizer, my_batches(STEPS))
    expected = by_rank_0(lambda: run(lambda optimizer: optimizer, all_batches(STEPS)))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.older_tensorflow
def test_loop_inside_a_function() -> None:
    weight = tf.Variable(np.ones(3, np.float32))
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(0.5))
    optimizer.build([weight])
    slope = tf.constant(float(hvpipe.rank()))

    @tf.function
    def steps() -> None:
        for _ in tf.range(4):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(weight * slope)
            optimizer.apply_gradients([(tape.gradient(value, weight), weight)])

    steps()
    np.testing.assert_allclose(weight.numpy(), 1 - 4 * 0.5 * (hvpipe.size() - 1) / 2, rtol=1e-6)


def test_different_sets_of_variables_in_turn() -> None:
    """hvpipe makes a plan for each set of variables, and reuses it."""
    model = compiled()
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    first, last = model.layers[0].kernel, model.layers[-1].kernel
    optimizer.build([first, last])
    start = np.array(first.numpy())
    for _ in range(2):
        optimizer.apply([tf.fill(first.shape, float(hvpipe.rank()))], [first])
        optimizer.apply([tf.zeros(first.shape), tf.ones(last.shape)], [first, last])
    moved = (start - first.numpy()).ravel()
    np.testing.assert_allclose(moved, np.full(first.shape, hvpipe.size() - 1.0).ravel(), rtol=1e-5)


def test_a_model_that_rank_0_has_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A loaded Sequential calls `sequential/dense/kernel` only `dense/kernel`."""
    model = mlp()
    if hvpipe.rank() == 0:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    hk.broadcast_variables(model.variables)
    model.compile(sgd(), loss())
    train(model, my_batches(1), False, hk.DistributedGradientTape)
    fit(parallel(model), my_batches(2))
    assert_same_on_all_ranks(state_of(model))
    assert not caplog.messages


def test_layers_have_an_order_rather_than_names(caplog: pytest.LogCaptureFixture) -> None:
    rank = hvpipe.rank()
    layers = [keras.layers.Dense(3, use_bias=False, name=name) for name in ("one", "other", f"own{rank}")]
    for layer in layers:
        layer.build((None, 2))
    one, other, own = (layer.kernel for layer in layers)
    ones = [tf.fill([2, 3], float(rank))] * 2
    says = r"same order.*variable 0 is one/kernel on rank 0 and other/kernel on rank 1"
    with pytest.raises(MismatchError, match=says):
        hk.average_gradients(ones, [other, one] if rank == 1 else [one, other])
    for averaged in hk.average_gradients(ones, [own, one]):
        np.testing.assert_allclose(averaged, np.full((2, 3), (hvpipe.size() - 1) / 2))
    told = "variable 0 is own0/kernel on rank 0 and own1/kernel on rank 1"
    assert sum(told in text for text in caplog.messages) == (rank == 0)


def test_a_gradient_of_another_type_than_its_variable() -> None:
    weight = tf.Variable(np.ones(3))
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.fill([3], float(hvpipe.rank()))], [weight])
    np.testing.assert_allclose(weight.numpy(), 1 - (hvpipe.size() - 1) / 2)


@pytest.mark.parametrize("known", [0, 1])
def test_a_variable_that_the_optimizer_does_not_know(known: int) -> None:
    """The error is that of plain Keras, also if the update runs bucket by bucket."""
    kernels = [layer.kernel for layer in compiled().layers]
    optimizer = hk.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.zeros(kernels[known].shape)], [kernels[known]])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([tf.zeros(kernel.shape) for kernel in kernels], kernels)


def test_arguments_of_horovod() -> None:
    """Arguments that change nothing are accepted. For the others the error says what to write."""
    options = {"name": "sgd", "device_dense": "", "sparse_as_dense": True, "backward_passes_per_step": 1}
    optimizer = keras.optimizers.SGD(0.1)
    assert (
        hk.DistributedOptimizer(optimizer, op="average", gradient_predivide_factor=1.0, **options)
        is optimizer
    )
    with pytest.raises(
        HvpipeError,
        match=r"DistributedOptimizer does not take .* backward_passes_per_step.*gradient_accumulation_steps= "
        r"of the Keras optimizer\. Received: backward_passes_per_step=4",
    ):
        hk.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=4)
    with pytest.raises(HvpipeError, match=r"op='sum' instead of average=False\. Received: average=False"):
        hk.allreduce(tf.constant(1.0), average=False)
    with pytest.raises(HvpipeError, match="Instead: all ranks take part"):
        hk.DistributedGradientTape(tf.GradientTape(), process_set=object())
    with pytest.raises(TypeError, match="unexpected keyword argument 'bukket_bytes'"):
        hk.DistributedOptimizer(keras.optimizers.SGD(0.1), bukket_bytes=7)
    hk.BroadcastGlobalVariablesCallback(0, device="")
    hk.MetricAverageCallback(device="")


def test_broadcast_variables_from_every_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_PIECE_BYTES", 20)  # cut between variables, and within the third
    for root in range(hvpipe.size()):
        rank = hvpipe.rank()
        mine = [
            tf.Variable(np.full(3, rank, np.float32)),
            keras.Variable(rank, dtype="int32"),
            tf.Variable(np.arange(7) + 100.0 * rank),
            tf.Variable(np.zeros((0, 2), np.float32)),
            tf.Variable(rank == root),
        ]
        hk.broadcast_variables(mine, root_rank=root)
        assert mine[0].numpy().tolist() == [root] * 3
        assert int(mine[1].numpy()) == root
        assert mine[2].numpy().tolist() == (np.arange(7) + 100.0 * root).tolist()
        assert mine[4].numpy()


def test_zeros_are_not_broadcast() -> None:
    """The slots of a new optimizer."""
    slot = tf.Variable(np.zeros(100_000, np.float32))
    before = current().engine.counters()["bytes_sent"]
    hk.broadcast_variables([slot])
    assert current().engine.counters()["bytes_sent"] - before < 10_000
    if hvpipe.rank() == hvpipe.size() - 1:
        slot.assign(np.full(100_000, -0.0, np.float32))
    hk.broadcast_variables([slot], hvpipe.size() - 1)
    assert np.signbit(slot.numpy()).all()


def test_callbacks_of_horovod_users() -> None:
    """Scripts for Horovod wrap the optimizer before `compile`, and broadcast and average in callbacks."""
    keras.utils.set_random_seed(100 + hvpipe.rank())
    model = mlp()
    model.compile(hk.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss=loss(), jit_compile=False)
    callbacks = [hk.BroadcastGlobalVariablesCallback(0), hk.MetricAverageCallback()]
    history = model.fit(my_batches(4), epochs=2, verbose=0, callbacks=callbacks).history
    assert_same_on_all_ranks(state_of(model))
    assert_same_on_all_ranks(history["loss"])


def with_a_tape() -> keras.Model:
    """Return a model whose train_step takes its gradients from a DistributedGradientTape."""

    class Taping(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            with hk.DistributedGradientTape(tf.GradientTape()) as tape:
                value = self.compute_loss(y=y, y_pred=self(x, training=True))
            gradients = tape.gradient(value, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": value}

    return Taping(mlp().layers)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("build", [mlp, with_a_tape])
def test_fit_of_data_of_unknown_length(build: Callable[[], keras.Model]) -> None:
    """The call that finds the end of the data must not announce a step, because no gradients would follow."""
    optimizer = keras.optimizers.SGD(0.1)
    model = compiled(build, hk.DistributedOptimizer(optimizer) if build is mlp else optimizer)
    for _ in range(2):
        model.fit(my_batches(4).filter(lambda *row: True), epochs=2, verbose=0)
        assert_same_on_all_ranks(hvpipe.allreduce(model.get_weights()[0]))
    if build is mlp:  # plain Keras also counts the call that finds the end
        assert int(model.optimizer.iterations) == 2 * 2 * 4
    assert_same_on_all_ranks(state_of(model))


@pytest.mark.older_tensorflow
def test_compiled_by_xla() -> None:
    """Keras compiles with XLA by itself if there is a GPU."""
    if hvpipe.size() == 1:
        pytest.skip("one rank reduces nothing")
    model = compiled(mlp, hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    with pytest.raises(HvpipeError, match=r"XLA cannot compile communication: pass jit_compile=False to"):
        model.fit(my_batches(2), verbose=0)
    assert hvpipe.allgather_object(0) == [0] * hvpipe.size()
    model = compiled(mlp, hk.DistributedOptimizer(keras.optimizers.SGD(0.1)), jit_compile=True)
    model.fit(my_batches(2), verbose=0, callbacks=[hk.BroadcastGlobalVariablesCallback(0)])
    assert model.jit_compile is False
    assert_same_on_all_ranks(state_of(model))


def test_a_loop_with_the_optimizer_of_a_data_parallel_model() -> None:
    """Otherwise ranks would diverge before the first step, and fail with unrelated errors after it."""
    model = parallel(compiled())

    def loop() -> None:
        train(model, my_batches(1), compile_step=False)

    if hvpipe.size() == 1:
        loop()
        return
    says = r"(?i)in a custom loop, wrap the optimizer in .*Received: an update by sgd"
    for _ in range(2):
        with pytest.raises(HvpipeError, match=says):
            loop()
        fit(model, my_batches(2))
        with pytest.raises(HvpipeError, match=says):
            loop()
        model.compile(keras.optimizers.SGD(0.1), loss=loss())
    hk.DistributedOptimizer(model.optimizer)
    loop()
    assert_same_on_all_ranks(state_of(model))


def test_optimizers_are_restored_after_data_parallel() -> None:
    model = parallel(compiled())
    first = model.optimizer
    model.compile(keras.optimizers.SGD(0.1), loss=loss())
    model._hvpipe.detach()
    assert not [o for o in (first, model.optimizer) if "apply" in vars(o)]


def test_the_broadcast_callback_needs_a_built_model() -> None:
    callback = hk.BroadcastGlobalVariablesCallback(0)
    callback.set_model(keras.Sequential([keras.layers.Dense(FEATURES)]))
    with pytest.raises(HvpipeError, match="not built"):
        callback.on_train_begin()


def test_wrong_arguments() -> None:
    with pytest.raises(HvpipeError, match=r"needs a keras.optimizers.Optimizer. Received: str"):
        hk.DistributedOptimizer("sgd")
    with pytest.raises(HvpipeError, match="compression"):
        hk.DistributedGradientTape(tf.GradientTape(), compression="int4")


@pytest.mark.parametrize("passes", [1, 2])
def test_loss_scaling_around_a_distributed_optimizer_is_refused(passes: int) -> None:
    """Each rank would skip its own overflowing updates, and with them their reductions."""
    if hvpipe.size() == 1:
        pytest.skip("one rank reduces nothing")
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
        model = compiled(mlp, own)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        with pytest.raises(HvpipeError, match=r"should be inside.*Received: DistributedOptimizer of SGD"):
            model.fit(my_batches(1), verbose=0)
        inside = hk.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        model = compiled(mlp, inside, jit_compile=False)
        model.fit(my_batches(2), verbose=0)
        assert_same_on_all_ranks(model.get_weights()[0])
    finally:
        keras.config.set_dtype_policy(policy)
