"""A training that loses ranks, for `hvpipe run --elastic`: elastic_job.py FOLDER OVERLAP RANK:STEP:PHASE ...

Each rank that is left writes its weights and times to FOLDER. `reference` trains the same in one process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

BATCHES, BATCH, EPOCHS, WIDTH = 23, 4, 2, 16

folder = Path()
kill_at: list[tuple[int, str]] = []  # steps and phases of this rank
step = 0
ends_s: list[float] = []  # of steps
epoch_ends: list[int] = []  # how many steps came before the end of each epoch


def maybe_die(phase: str) -> None:
    """Die in this phase of the step if that was asked for.

    Phases are "begin", "forward", "backward", "update", "end", "validate" and "epoch_end". "after0.01" is
    0.01 s after "begin".
    """
    if (step, phase) in kill_at:
        time.sleep(0.02)  # other ranks go on as far as they can
        die()
    if phase == "begin":
        for at, when in kill_at:
            if at == step and when.startswith("after"):
                threading.Timer(float(when.removeprefix("after")), die).start()


def die() -> None:
    """Note the time, and die as a rank does whose host runs out of memory."""
    (folder / f"killed-{os.getpid()}").write_text(repr(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def dies(phase: str, value: Any) -> Any:
    """Return `value`, once this phase was survived."""

    def look(given: Any) -> Any:
        maybe_die(phase)
        return given

    found = tf.numpy_function(look, [value], value.dtype)
    found.set_shape(value.shape)
    return found


class MayDie(keras.layers.Layer):
    """Passes its input on."""

    def call(self, inputs: Any) -> Any:
        @tf.custom_gradient
        def passed_on(x: Any) -> Any:
            return dies("forward", x), lambda upstream: dies("backward", upstream)

        return passed_on(inputs)


class DyingSGD(keras.optimizers.SGD):
    """Updates some variables before it may die."""

    deadly: Any = None  # the variable in whose update it dies

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable is self.deadly:
            gradient = dies("update", gradient)
        super().update_step(gradient, variable, learning_rate)


class Counts(keras.callbacks.Callback):
    reads_weights = stops_training = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        global step
        step += 1
        maybe_die("begin")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        ends_s.append(time.time())
        maybe_die("end")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        maybe_die("validate")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        epoch_ends.append(int(self.model.optimizer.iterations.numpy()))
        maybe_die("epoch_end")


def make_model(may_die: bool) -> keras.Model:
    """Return the model; one that may die, if asked for."""
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(WIDTH, "tanh", name=name) for name in ("first", "middle", "last")]
    extra = [MayDie()] if may_die else []
    model = keras.Sequential([keras.Input([WIDTH]), *layers[:2], *extra, layers[2], keras.layers.Dense(1)])
    kind = DyingSGD if may_die else keras.optimizers.SGD
    model.compile(kind(0.05, momentum=0.9), "mse")
    if may_die:
        model.optimizer.deadly = model.get_layer("middle").kernel.value
    return model


def make_batches() -> list[tuple[Any, Any]]:
    random = np.random.default_rng(3)
    x = random.normal(size=(BATCHES, BATCH, WIDTH)).astype(np.float32)
    return list(zip(x, np.sin(x.sum(-1, keepdims=True)), strict=True))


def reference(
    changes: Sequence[tuple[int, int]], ends: Sequence[int], size: int, factor: float = 1.0
) -> list[Any]:
    """Return the weights of one process that trains on the batches of all ranks together.

    Args:
        changes: For each loss, the last step before it and the number of ranks afterwards.
        ends: How many steps came before the end of each epoch. A loss after the last step of an epoch may
            belong to it, and then the ranks that are left may have enough batches for one more step.
        size: The number of ranks at the start.
        factor: What a change of the number of ranks multiplies the learning rate with.

    Raises:
        ValueError: If an epoch ended too early or too late.
    """
    model, batches, done = make_model(False), make_batches(), 0
    left = list(changes)
    for end in ends:
        at = 0
        while done < end:
            while left and left[0][0] == done:
                size = left.pop(0)[1]
                model.optimizer.learning_rate = float(model.optimizer.learning_rate) * factor
            if at + size > BATCHES:
                break
            x, y = (np.concatenate(part) for part in zip(*batches[at : at + size], strict=True))
            model.train_on_batch(x, y)
            at, done = at + size, done + 1
        if done != end or at + size <= BATCHES:
            raise ValueError(f"an epoch ended after step {end}, with {BATCHES - at} batches for {size} ranks")
    return model.get_weights()


def main(overlap: str, kills: list[str]) -> None:
    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init()
    first_rank = hvpipe.rank()
    for kill in kills:
        rank, at, phase = kill.split(":")
        if int(rank) == first_rank:
            kill_at.append((int(at), phase))
    model = hk.data_parallel(make_model(True), overlap=overlap, bucket_bytes=1024)
    x, y = (np.stack(part) for part in zip(*make_batches(), strict=True))
    data = hk.shard(tf.data.Dataset.from_tensor_slices((x, y)))
    changes = []

    @hk.on_resize
    def note(change: Any) -> None:
        assert not change.lost or change.rank <= change.old_rank  # ranks keep their order
        changes.append((int(model.optimizer.iterations.numpy()), change.size, change.lost))

    extra = [hk.Checkpoint(folder / "checkpoints", every=10_000)] if os.environ.get("CHECKPOINTS") else []
    again = hk.shard(tf.data.Dataset.from_tensor_slices((x, y)))
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Counts(), *extra], validation_data=again)
    np.savez(folder / f"rank-{first_rank}.npz", *model.get_weights())
    told = {
        "rank": hvpipe.rank(),
        "size": hvpipe.size(),
        "changes": changes,
        "epochs": len(history.history["loss"]),
        "val_loss": history.history["val_loss"],
        "epoch_ends": epoch_ends,
        "ends_s": ends_s,
        "rate": float(model.optimizer.learning_rate.numpy()),
    }
    (folder / f"rank-{first_rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    main(sys.argv[2], sys.argv[3:])
