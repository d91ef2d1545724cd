"""`local` trains as its formula says, and shows one averaged model wherever weights are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from hvpipe.errors import HvpipeError
from training import (
    CLASSES,
    FEATURES,
    assert_close,
    assert_same_on_all_ranks,
    by_rank_0,
    compiled,
    fit,
    loss,
    mlp,
    my_batches,
    parallel,
    samples,
    table,
)

Arrays = list[np.ndarray]
EPOCHS, STEPS, EVERY = 2, 8, 3
RATE, MOMENTUM, WAITING_STEPS = 0.7, 0.9, 4  # only the first round waits

LIMIT = keras.constraints.MaxNorm(1.0)


def batch_of(rank: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch whose size depends on rank and step: averages are weighted."""
    return samples(4 + (3 * rank + step) % 5, seed=100 * rank + step)


def linear() -> keras.Model:
    """Build a model whose kernel has a constraint, which counts at every step and for averages."""
    dense = keras.layers.Dense(CLASSES, kernel_constraint=LIMIT)
    model = keras.Sequential([keras.Input((FEATURES,)), dense])
    model.compile(keras.optimizers.SGD(0.2, momentum=0.5), loss())
    return model


class Simulated:
    """All ranks in one process, with plain Keras and NumPy.

    Args:
        size: The ranks.
        turn: Steps between the ends of two fragments' rounds.
        fragments: Each fragment's weights: 0 is the kernel, 1 the bias.
    """

    def __init__(self, size: int, turn: int, fragments: list[list[int]]) -> None:
        keras.utils.set_random_seed(5)
        self.ranks = [linear() for _ in range(size)]
        self.turn, self.fragments = turn, fragments
        self.anchor: Arrays = self.ranks[0].get_weights()
        self.momentum = [np.zeros_like(a) for a in self.anchor]
        self.steps = 0

    def epoch(self) -> Arrays:
        """Return the averaged weights after an epoch."""
        for model in self.ranks:
            model.set_weights(self.anchor)
        self.starts = [model.get_weights() for model in self.ranks]
        self.counts = np.zeros((2, len(self.ranks)))  # of each weight: every rank's samples since it was sent
        self.sent: dict[int, list[Arrays]] = {}
        for step in range(STEPS):
            for rank, model in enumerate(self.ranks):
                batch = batch_of(rank, step)
                model.train_on_batch(*batch)
                self.counts[:, rank] += len(batch[0])
            self.steps += 1
            turns, steps = divmod(step + 1, self.turn)
            if not steps:
                self.correct()
                self.send(self.fragments[(turns - 1) % len(self.fragments)])
                if self.steps <= WAITING_STEPS:
                    self.correct()
        last = self.fragments[(turns - 1) % len(self.fragments)] if not steps else []
        self.correct()
        self.send([place for place in (0, 1) if place not in last])
        self.correct()
        return self.anchor

    def send(self, weights: list[int]) -> None:
        """Note the weighted mean of what the ranks have changed in these weights since they sent them."""
        now = [model.get_weights() for model in self.ranks]
        for place in weights:
            changed = [start[place] - weight[place] for start, weight in zip(self.starts, now, strict=True)]
            shares = self.counts[place] / self.counts[place].sum()
            self.sent[place] = sum(s * c for s, c in zip(shares, changed, strict=True))
            self.counts[place] = 0
            for start, weight in zip(self.starts, now, strict=True):
                start[place] = weight[place]

    def correct(self) -> None:
        """Move the anchor by what was sent. Ranks go on there with what they have changed since."""
        now = [model.get_weights() for model in self.ranks]
        for place, mean in self.sent.items():
            self.momentum[place] = MOMENTUM * self.momentum[place] + mean
            moved = self.anchor[place] - RATE * (mean + MOMENTUM * self.momentum[place])
            self.anchor[place] = moved if place else np.array(LIMIT(moved))
            for start, weight in zip(self.starts, now, strict=True):
                weight[place] = self.anchor[place] - (start[place] - weight[place])
                start[place] = self.anchor[place]
        for model, weights in zip(self.ranks, now, strict=True):
            model.set_weights(weights)
        self.sent = {}


def simulate(size: int, turn: int, fragments: list[list[int]]) -> tuple[list[Arrays], list[Arrays]]:
    """Return the averaged weights after each epoch, and every rank's own momenta at the end."""
    simulated = Simulated(size, turn, fragments)
    if size == 1:  # plain Keras
        (model,) = simulated.ranks
        for step in [*range(STEPS)] * EPOCHS:
            model.train_on_batch(*batch_of(0, step))
        return [model.get_weights()], [slots_of(model)]
    epochs = [[np.array(a) for a in simulated.epoch()] for _ in range(EPOCHS)]
    return epochs, [slots_of(model) for model in simulated.ranks]


def slots_of(model: keras.Model) -> Arrays:
    return [np.array(v) for v in model.optimizer.variables[2:]]


def local(model: keras.Model, **options: Any) -> keras.Model:
    rounds = {"every": EVERY, "outer_learning_rate": RATE, "outer_momentum": MOMENTUM, "warmup_steps": 0}
    return parallel(model, "local", **{**rounds, **options})


def alike(found: Arrays, wanted: Arrays) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-6)


def equal_on_all_ranks(arrays: Any) -> None:
    assert_same_on_all_ranks({str(place): array for place, array in enumerate(arrays)})


@pytest.mark.every_size
@pytest.mark.older_tensorflow
@pytest.mark.parametrize(("turn", "fragments"), [(EVERY, [[0, 1]]), (EVERY, [[0], [1]])])
def test_weights_are_those_of_the_formula(turn: int, fragments: list[list[int]]) -> None:
    wanted, slots = by_rank_0(lambda: simulate(hvpipe.size(), turn, fragments))
    keras.utils.set_random_seed(5)
    rounds = {"every": turn * len(fragments), "fragments": len(fragments)}
    model = local(linear(), warmup_steps=WAITING_STEPS, **rounds)
    mine = [batch_of(hvpipe.rank(), step) for step in range(STEPS)]
    kinds = tuple(tf.TensorSpec((None, *part.shape[1:]), part.dtype) for part in mine[0])
    data = tf.data.Dataset.from_generator(lambda: iter(mine), output_signature=kinds)
    data = data.apply(tf.data.experimental.assert_cardinality(STEPS))
    seen: list[Arrays] = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(model.get_weights()))
    begun = hvpipe.counters().get("steps", 0)
    fit(model, data, epochs=EPOCHS, callbacks=[look])
    for found, right in zip(seen[-len(wanted) :], wanted, strict=True):
        alike(found, right)
    alike(slots_of(model), slots[hvpipe.rank()])
    equal_on_all_ranks(seen[-1])
    if hvpipe.size() > 1:
        sent = STEPS // EVERY + len(fragments)  # in turn, and all at the end of an epoch
        assert hvpipe.counters()["steps"] - begun == EPOCHS * sent


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("build", [mlp, table])
def test_rounds_of_one_step_that_average_weights_are_plain_sgd(build: Any) -> None:
    """The data's length is unknown: its end comes when a round would begin."""

    def trained(overlap: str, **options: Any) -> Any:
        model = parallel(compiled(build, keras.optimizers.SGD(0.1)), overlap, **options)
        fit(model, my_batches(5).filter(lambda *batch: True), epochs=2)
        return {str(place): array for place, array in enumerate(model.get_weights())}

    assert_close(trained("local", every=1, warmup_steps=10**6), trained("none"), 1e-5)


class Act(keras.callbacks.Callback):
    """Calls `act` at the end of the second batch, within a round."""

    reads_weights = stops_training = False

    def __init__(self, act: Callable[[keras.Model], Any]) -> None:
        super().__init__()
        self.act = act
        self.found: Any = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.found = self.act(self.model)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(HvpipeError) as caught:
        call()
    return str(caught.value)


def test_weights_within_a_round() -> None:
    """They differ between ranks. The model does not show them, and `evaluate` averages them first."""
    if hvpipe.size() == 1:
        pytest.skip("one rank alone has no rounds")
    model = local(compiled())

    def act(model: keras.Model) -> Any:
        own = [np.array(v) for v in model.trainable_variables]
        for call in (model.get_weights, lambda: model.predict(samples(2)[0]), lambda: model.save("m.keras")):
            assert "in the middle of a round" in refused(call)
        model.evaluate(*samples(6), verbose=0)
        return own, model.get_weights()

    callback = Act(act)
    fit(model, my_batches(5), epochs=2, callbacks=[callback])
    own, averaged = callback.found
    assert len({hash(kernel.tobytes()) for kernel in hvpipe.allgather_object(own[0])}) == hvpipe.size()
    equal_on_all_ranks(averaged)
    equal_on_all_ranks(model.get_weights())


def test_a_later_fit_goes_on_and_takes_rank_0s_weights(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizers' own states are no difference to be told of. Weights set on one rank are."""
    if hvpipe.size() == 1:
        pytest.skip("one rank alone has no rounds")
    model = local(compiled())
    fit(model, my_batches(4))
    momenta = slots_of(model)
    fit(model, my_batches(4))
    assert "differed from rank 0" not in caplog.text
    assert len({hash(m[0].tobytes()) for m in hvpipe.allgather_object(momenta)}) == hvpipe.size()
    if hvpipe.rank() == 0:
        model.set_weights([array + 1 for array in model.get_weights()])
    fit(model, my_batches(4), epochs=2)
    assert ("differed from rank 0" in caplog.text) == (hvpipe.rank() == 0)
    equal_on_all_ranks(model.get_weights())


def test_compressed_differences_send_less_and_lose_nothing_for_good() -> None:
    """What a round leaves out, the next one sends."""
    if hvpipe.size() == 1:
        pytest.skip("one rank alone has no rounds")

    def wide() -> keras.Model:
        hidden = keras.layers.Dense(1200, activation="tanh")
        return keras.Sequential([keras.Input((FEATURES,)), hidden, keras.layers.Dense(CLASSES)])

    def trained(compression: str | None) -> tuple[dict[str, np.ndarray], float]:
        model = compiled(wide, keras.optimizers.SGD(0.1))
        model = parallel(model, "local", every=2, compression=compression)
        before = hvpipe.counters()["bytes_sent"]
        fit(model, my_batches(12), epochs=2)
        weights = {str(place): array for place, array in enumerate(model.get_weights())}
        return weights, hvpipe.counters()["bytes_sent"] - before

    (exact, bytes_exact), (found, bytes_found) = trained(None), trained("int8")
    assert_same_on_all_ranks(found)
    assert bytes_found < 0.5 * bytes_exact
    assert_close(found, exact, 0.02)
    assert any(not np.array_equal(found[name], exact[name]) for name in exact)


def test_a_slow_link_chooses_and_says_what(caplog: pytest.LogCaptureFixture) -> None:
    model = hk.data_parallel(compiled(), link="slow", warmup_steps=3)
    said = "overlap='local', every=4, fragments=4, compression='int8'. Each rank updates with its own"
    assert (said in caplog.text) == (hvpipe.rank() == 0 < hvpipe.size() - 1)
    fit(model, my_batches(9))
    equal_on_all_ranks(model.get_weights())
    fit(hk.data_parallel(linear(), link="slow"), my_batches(3))
    assert ("fragments=2" in caplog.text) == (hvpipe.rank() == 0 < hvpipe.size() - 1)

    def refusal(**options: Any) -> str:
        return refused(lambda: hk.data_parallel(compiled(), **{"link": "slow", **options}))

    assert "leave them out. Received: every=4, outer_momentum=0.9" in refusal(every=4, outer_momentum=0.9)
    assert "Received: link='fast'" in refusal(link="fast")


def test_what_is_refused() -> None:
    def wrap(overlap: str = "local", **options: Any) -> str:
        return refused(lambda: hk.data_parallel(compiled(), overlap, **options))

    assert "needs every, the steps of a round, at least 1. Received: every=None" in wrap()
    assert "Received: every=0" in wrap(every=0)
    assert "Received: every=2.0" in wrap(every=2.0)
    assert 'are for overlap="local". Received: every=4' in wrap("step", every=4)
    assert "Received: every=None, fragments=2" in wrap("step", fragments=2)
    assert "Received: every=4 with fragments=3" in wrap(every=4, fragments=3)
    assert "at least 1. Received: fragments=0" in wrap(every=4, fragments=0)
    assert "at least 0. Received: warmup_steps=inf" in wrap(every=4, warmup_steps=float("inf"))
    assert "Received: outer_learning_rate=0" in wrap(every=2, outer_learning_rate=0)
    assert "Received: outer_momentum=1" in wrap(every=2, outer_momentum=1)
    assert "Received: nonfinite='skip'" in wrap(every=2, nonfinite="skip")
    assert "Received: verify_every=10" in wrap(every=2, verify_every=10)
    assert "Received: sync_batch_norm=True" in wrap(every=2, sync_batch_norm=True)
    if hvpipe.size() == 1:
        return
    averaging = local(compiled(optimizer=keras.optimizers.SGD(0.1, use_ema=True)))
    assert "with use_ema=True" in refused(lambda: fit(averaging, my_batches(2)))
    several = local(compiled(steps_per_execution=2))
    assert "every=3 with steps_per_execution=2" in refused(lambda: fit(several, my_batches(2)))
    several = local(compiled(steps_per_execution=2), every=6, fragments=2)
    assert "every=6, fragments=2 with steps_per_execution=2" in refused(lambda: fit(several, my_batches(2)))
    many = local(compiled(), every=64, fragments=64)
    assert "the trained variables. Received: fragments=64" in refused(lambda: fit(many, my_batches(2)))
    assert "needs fit" in refused(lambda: local(compiled()).train_on_batch(*samples(4)))
