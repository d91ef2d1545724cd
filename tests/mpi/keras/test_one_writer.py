"""Keras callbacks that write files, given to all ranks with the same path: only one rank writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvpipe
from training import (
    again,
    assert_same_bits,
    assert_same_on_all_ranks,
    compiled,
    fit,
    my_batches,
    parallel,
    state_of,
    usual,
)


class Counting:
    """Counts the calls of `model.save` and similar methods on this rank."""

    def __init__(self, model: keras.Model) -> None:
        self.count = 0
        for name in ("save", "save_weights"):
            setattr(model, name, self._counted(getattr(model, name)))

    def _counted(self, own: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return own(*args, **kwargs)

        return counted


def tensorboard(folder: Path) -> keras.callbacks.TensorBoard:
    """Return a callback that opens its file but writes no scalars. Those need the tensorboard package."""
    made = keras.callbacks.TensorBoard(folder, write_graph=False)
    made._summary_module = SimpleNamespace(
        create_file_writer=tf.summary.create_file_writer, scalar=lambda *args, **kwargs: None
    )
    return made


def test_one_rank_writes_if_all_have_the_callback(folder: Path, tmp_path: Path) -> None:
    model = parallel(compiled())
    saved = Counting(model)
    callbacks = [
        keras.callbacks.ModelCheckpoint(folder / "new" / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(
            folder / "new" / "best.weights.h5", "loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.CSVLogger(tmp_path / f"own-{hvpipe.rank()}.csv"),
        tensorboard(folder / "events"),
    ]
    history = fit(model, my_batches(3), epochs=2, callbacks=callbacks)
    assert_same_on_all_ranks(history["loss"])
    hvpipe.barrier()
    assert (saved.count > 0) == (hvpipe.rank() == 0)
    assert sorted(path.name for path in (folder / "new").iterdir()) == [
        "1.keras",
        "2.keras",
        "best.weights.h5",
    ]
    assert_same_bits(state_of(keras.models.load_model(folder / "new" / "2.keras")), state_of(model))
    rows = (folder / "log.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["epoch", "0", "1"]
    assert (tmp_path / f"own-{hvpipe.rank()}.csv").read_text().splitlines() == rows
    assert len(list((folder / "events" / "train").iterdir())) == 1


class Crash(keras.callbacks.Callback):
    """Ends `fit` when its second epoch begins."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 2:
            raise RuntimeError("power failure")


@pytest.mark.older_tensorflow
def test_training_resumes_from_the_backup_of_one_rank(folder: Path) -> None:
    def run(*callbacks: Any) -> tuple[Any, list[int]]:
        model = parallel(compiled())
        model.set_weights([v + hvpipe.rank() for v in model.get_weights()])
        seen: list[int] = []
        look = keras.callbacks.LambdaCallback(lambda epoch, logs: seen.append(epoch))
        fit(model, my_batches(3), epochs=4, callbacks=[*callbacks, look])
        return state_of(model), seen

    whole, epochs = run()
    assert epochs == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="power failure"):
        run(keras.callbacks.BackupAndRestore(str(folder / "backup")), Crash())
    hvpipe.barrier()
    found, epochs = run(keras.callbacks.BackupAndRestore(str(folder / "backup")))
    assert epochs == [2, 3]
    assert_same_on_all_ranks(found)
    assert_same_bits(found, whole)
    hvpipe.barrier()
    assert not (folder / "backup").exists()


def test_resuming_by_hand_from_weights_that_rank_0_loaded(folder: Path) -> None:
    """Follows the example in docs/checkpoints.md."""
    model = again(usual, "step")
    fit(model, my_batches(3), epochs=2)
    if hvpipe.rank() == 0:
        model.save_weights(folder / "last.weights.h5")
    fit(model, my_batches(3), epochs=4, initial_epoch=2)
    other = parallel(compiled())
    epoch = 0
    if hvpipe.rank() == 0:
        other.optimizer.build(other.trainable_variables)
        other.load_weights(folder / "last.weights.h5")
        epoch = int(other.optimizer.iterations) // 3
    epoch = hvpipe.broadcast_object(epoch)
    assert epoch == 2
    fit(other, my_batches(3), epochs=4, initial_epoch=epoch)
    assert_same_bits(state_of(other), state_of(model))
    assert int(other.optimizer.iterations) == 4 * 3
