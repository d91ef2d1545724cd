"""A resumed `fit` reads the batches that come next, in the order that they would have had."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvpipe.checkpoints.files import FileRecord
from hvpipe.checkpoints.manifest import Manifest, Position, RankPart
from hvpipe.errors import HvpipeError
from hvpipe.keras.checkpoint.data_position import OwnRank, ResumedReading, resumed_reading
from hvpipe.keras.data_parallel import shards
from hvpipe.keras.data_parallel.elastic_data import ElasticData
from hvpipe.keras.fit_call import FitCall

BATCHES, BATCH = 6, 2
EPOCHS, EPOCH, SKIPPED = 4, 2, 3  # stopped in the third epoch, after three batches


class Recorder(keras.Model):
    """Remembers the first number of every batch that it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def train_step(self, data: Any) -> Any:
        leaf = data[0] if isinstance(data, tuple) else data
        self.seen.append(int(leaf[0]))
        return {"loss": 0.0}


def numbers() -> Any:
    return tf.data.Dataset.range(BATCHES * BATCH)


def shuffled() -> Any:
    return numbers().shuffle(100, seed=3).batch(BATCH)


def of_unknown_length() -> Any:
    return numbers().shuffle(100, seed=3).filter(lambda i: i >= 0).batch(BATCH)


def repeated() -> Any:
    return shuffled().repeat()


def arrays() -> Any:
    keras.utils.set_random_seed(9)
    return np.arange(BATCHES * BATCH)


def manifest(epoch: int, batch: int, ranks: int, epoch_samples: int, **notes: int) -> Manifest:
    parts = tuple(RankPart(rank, FileRecord("", 0, ""), (), notes=notes) for rank in range(ranks))
    step = epoch * BATCHES + batch
    samples = epoch * BATCHES * BATCH + epoch_samples
    return Manifest("0", "data_parallel", Position(step, epoch, batch, samples, epoch_samples), {}, parts)


def ranks(rank: int, size: int) -> OwnRank:
    return OwnRank(rank, size, lambda batch: len(tf.nest.flatten(batch)[0]))


def train(
    data: Any,
    steps_per_epoch: int | None,
    resume: tuple[Manifest, OwnRank] | None = None,
    x: Any = None,
    first: int = 0,
) -> list[int]:
    """Return what an eager `fit` trains on: from epoch `first` on, or from a checkpoint."""
    model = Recorder()
    model.compile("sgd", run_eagerly=True)
    options: dict[str, Any] = {"epochs": EPOCHS, "steps_per_epoch": steps_per_epoch, "verbose": 0}
    if isinstance(data, np.ndarray):
        options["batch_size"] = BATCH
    if resume is None:
        model.fit(data, initial_epoch=first, **options)
        return model.seen
    model.make_train_function()
    inner, calls, reading = model.train_function, 0, None
    given: Any = None

    def train_function(iterator: Any) -> Any:
        nonlocal calls, reading, given
        if reading is None:
            given = iterator
            call = FitCall(data if x is None else x, steps_per_epoch)
            reading = resumed_reading(iterator, call, watch.params["steps"], *resume)
        calls += 1
        if calls <= reading.skipped:
            return {}
        own = reading.iterator is None or iterator is not given
        return inner(iterator if own else reading.iterator)

    model.train_function = train_function
    watch = keras.callbacks.Callback()
    model.fit(data, initial_epoch=resume[0].position.epoch, callbacks=[watch], **options)
    return model.seen


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("make", "steps_per_epoch", "steps_in_epoch"),
    [
        (shuffled, None, BATCHES),
        (shuffled, BATCHES, BATCHES),
        (of_unknown_length, None, BATCHES),
        (repeated, 4, 4),
        (arrays, None, BATCHES),
    ],
)
def test_the_same_order_after_the_same_batch(
    make: Callable[[], Any], steps_per_epoch: int | None, steps_in_epoch: int
) -> None:
    whole = train(make(), steps_per_epoch)
    assert len(whole) == EPOCHS * steps_in_epoch
    if make is not arrays:  # Keras shuffles arrays in the same way in every epoch, once a seed is set
        assert whole[:steps_in_epoch] != whole[steps_in_epoch : 2 * steps_in_epoch]
    position = manifest(EPOCH, SKIPPED, 1, SKIPPED * BATCH)
    rest = train(make(), steps_per_epoch, (position, ranks(0, 1)))
    assert rest == whole[EPOCH * steps_in_epoch + SKIPPED :]


@pytest.mark.parametrize(("make", "steps_per_epoch"), [(shuffled, None), (repeated, BATCHES)])
def test_a_fit_that_began_with_a_later_epoch(make: Callable[[], Any], steps_per_epoch: int | None) -> None:
    """Regression: iterators and batches were counted from epoch 0."""
    whole = train(make(), steps_per_epoch, first=1)
    position = manifest(EPOCH, SKIPPED, 1, SKIPPED * BATCH, first_epoch=1)
    rest = train(make(), steps_per_epoch, (position, ranks(0, 1)))
    assert rest == whole[(EPOCH - 1) * BATCHES + SKIPPED :]


def test_a_last_call_of_fewer_steps() -> None:
    """With 4 steps_per_execution Keras takes 8 batches in an epoch of 6 steps."""
    found = iter(repeated())
    resumed_reading(found, FitCall(repeated(), 6), 6, manifest(2, 4, 1, 8), ranks(0, 1), 4)
    wanted = iter(repeated())
    for _ in range(2 * 8 + 4):
        next(wanted)
    np.testing.assert_array_equal(next(found), next(wanted))


def shard(source: Any, rank: int, ranks: int) -> Any:
    """Return what `hk.shard` returns."""
    found = source.take(BATCHES // ranks * ranks).shard(ranks, rank)
    vars(found)[shards._SOURCE] = source
    return found


def test_on_more_ranks_the_epoch_continues_after_the_same_samples() -> None:
    """One rank has trained on two of six batches; two ranks share the other four."""
    whole = train(shuffled(), None)
    position = manifest(EPOCH, 2, 1, 2 * BATCH)
    seen = [train(shard(shuffled(), rank, 2), None, (position, ranks(rank, 2))) for rank in (0, 1)]
    epoch = whole[EPOCH * BATCHES : (EPOCH + 1) * BATCHES]
    assert [seen[i % 2][i // 2] for i in range(4)] == epoch[2:]
    following = whole[(EPOCH + 1) * BATCHES :]
    assert [seen[i % 2][2 + i // 2] for i in range(6)] == following


def test_on_fewer_ranks_where_no_batch_begins_there(caplog: pytest.LogCaptureFixture) -> None:
    """In the first epoch, three ranks have trained on three batches; two ranks can only share two or four."""
    position = manifest(0, 1, 3, 3 * BATCH)
    with caplog.at_level(logging.WARNING, "hvpipe"):
        seen = [train(shard(shuffled(), rank, 2), None, (position, ranks(rank, 2))) for rank in (0, 1)]
    whole = train(shuffled(), None)
    assert [seen[i % 2][i // 2] for i in range(2)] == whole[4:6]
    assert "cannot continue at exactly the same sample" in caplog.text


def test_the_second_resume_after_a_change_of_ranks() -> None:
    """Regression: one batch on one rank, then one round on two. By steps it would be four batches."""
    position = manifest(EPOCH, 2, 2, 3 * BATCH, source=3)
    seen = [train(shard(shuffled(), rank, 2), None, (position, ranks(rank, 2))) for rank in (0, 1)]
    epoch = train(shuffled(), None)[EPOCH * BATCHES : (EPOCH + 1) * BATCHES]
    assert [seen[i % 2][i // 2] for i in range(2)] == epoch[3:5]


def test_the_second_resume_of_a_dataset_that_repeats() -> None:
    """Other ranks had trained in the first epochs, with fewer batches for each."""
    position = manifest(EPOCH, SKIPPED, 1, SKIPPED * BATCH, read=5)
    assert train(repeated(), 4, (position, ranks(0, 1))) == train(repeated(), 4)[5:][: 8 - SKIPPED]


def test_what_a_checkpoint_notes() -> None:
    assert ResumedReading(None, 2).notes(5, 3) == {}
    assert ResumedReading(None, 2, source=4).notes(5, 3) == {"source": 19}
    assert ResumedReading(None, 2, read=4).notes(5, 3) == {"read": 9}


def test_an_elastic_job_resumes_after_the_last_batch() -> None:
    """Regression: three ranks, then two, have trained on five batches. The half of five was rounded down."""
    session: Any = SimpleNamespace(world=SimpleNamespace(rank=0, size=3))
    source = tf.data.Dataset.range(9)
    data = ElasticData(session, source, None)
    batches = data.epoch(lambda: None, lambda: None)
    _, _, iterator = next(batches)
    assert int(data.take(1, iterator)) == 0
    session.world.size = 2
    assert int(data.take(2, iterator)) == 3
    notes = data.notes(2)
    resumed = ElasticData(session, source, None)
    _, _, iterator = next(resumed.epoch(lambda: None, lambda: None))
    resumed.resume(0, data.batch() or 0, 2, notes)
    assert int(resumed.take(1, iterator)) == 5


def test_data_that_ends_too_early() -> None:
    short = numbers().batch(BATCH).take(2)
    with pytest.raises(HvpipeError, match="Received: it ends after 2 of 3 batches"):
        train(short, None, (manifest(0, 3, 1, 6), ranks(0, 1)))


def test_a_finite_dataset_over_epochs() -> None:
    with pytest.raises(HvpipeError, match=r"should repeat\(\) to be resumed"):
        train(shuffled(), 4, (manifest(2, 1, 1, 2), ranks(0, 1)))
