"""Train Keras models with TensorFlow on GPUs: `hvpipe run -np 2 -m bench.gpu.check_tf ROWS.json [small]`.

Every overlap mode must give the bits of "none", and all ranks the same weights, with convolutions, an
Embedding, half types, loss scaling, compression and several steps per execution. One rank must train as the
ranks together do. Then it times steps of ResNet-50, trains two stages of a pipeline and two replicas of one
stage, and times ResNet-50 with XLA. Each part is a row; one that fails does not stop the others, but what
follows an error of the engine fails with it. Exit code 1 if one failed. bench/README.md says how to bring
TensorFlow to a machine without network.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe
import hvpipe.keras as hk
from bench.gpu.rows import Rows
from hvpipe.session import current

BATCH, STEPS, CLASSES = 16, 8, 10
MODES = ("backward", "step")


def convolutions() -> keras.Model:
    x = keras.Input((16, 16, 3))
    y = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    y = keras.layers.Conv2D(64, 3, strides=2, activation="relu")(y)
    y = keras.layers.Dense(64, activation="relu")(keras.layers.GlobalAveragePooling2D()(y))
    return keras.Model(x, keras.layers.Dense(CLASSES, dtype="float32")(y))


def embedded() -> keras.Model:
    x = keras.Input((12,), dtype="int32")
    y = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(5000, 64)(x))
    y = keras.layers.Dense(64, activation="relu")(y)
    return keras.Model(x, keras.layers.Dense(CLASSES, dtype="float32")(y))


def batches(build: Callable[[], keras.Model], rank: int, size: int) -> tf.data.Dataset:
    """Return the batches of one rank of `size`: its part of each batch of all ranks."""
    draw = np.random.default_rng(5)
    count = BATCH * hvpipe.size() * STEPS
    if build is embedded:
        x = draw.integers(0, 5000, (count, 12)).astype("int32")
    else:
        x = draw.normal(size=(count, 16, 16, 3)).astype("float32")
    y = draw.integers(0, CLASSES, count)
    x, y = (a.reshape(STEPS, size, count // STEPS // size, *a.shape[1:])[:, rank] for a in (x, y))
    return tf.data.Dataset.from_tensor_slices((x, y))


def compiled(model: keras.Model, **options: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, jit_compile=False, **options)
    return model


def trained(
    build: Callable[[], keras.Model],
    overlap: str | None,
    *,
    policy: str = "float32",
    steps_per_execution: int = 1,
    **options: Any,
) -> list[np.ndarray]:
    """Train some steps and return the weights; `overlap` None: plain Keras on the batches of all ranks."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(build(), steps_per_execution=steps_per_execution)
    finally:
        keras.config.set_dtype_policy("float32")
    if overlap is None:
        model.fit(batches(build, 0, 1), verbose=0)
    else:
        model = hk.data_parallel(model, overlap, bucket_bytes=20_000, **options)
        model.fit(batches(build, hvpipe.rank(), hvpipe.size()), verbose=0)
        device = model.trainable_variables[0].value.device
        if not device.endswith("GPU:0"):
            raise RuntimeError(f"weights should be on the GPU. Received: {device}")
    return [weight.numpy() for weight in model.weights]


def bits_of(weights: list[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)


# float16 has a loss scale.
COMPARED: tuple[tuple[str, Callable[[], keras.Model], dict[str, Any]], ...] = (
    ("convolutions", convolutions, {}),
    ("Embedding", embedded, {}),
    ("mixed_bfloat16", convolutions, {"policy": "mixed_bfloat16"}),
    ("mixed_float16", convolutions, {"policy": "mixed_float16"}),
    ('compression="bf16"', convolutions, {"compression": "bf16"}),
    ("steps_per_execution=4", convolutions, {"steps_per_execution": 4}),
)


class Check:
    """The parts, each of which notes rows."""

    def __init__(self, rows: Rows, steps: int) -> None:
        self._rows, self._steps = rows, steps

    def compare(self, what: str, build: Callable[[], keras.Model], **options: Any) -> None:
        """Compare the overlap modes, and all ranks, bit by bit."""
        linear = trained(build, "none", **options)
        mine = [bits_of(linear), *(bits_of(trained(build, mode, **options)) for mode in MODES)]
        everyone = hvpipe.allgather_object(mine)
        equal = all(each == mine[0] for rank in everyone for each in rank)
        finite = all(np.isfinite(weight).all() for weight in linear)
        result = "the same bits in every mode, on all ranks" if equal else "BITS DIFFER"
        self._rows.note(what, result if finite else "NOT FINITE", equal and finite)

    def facts(self) -> None:
        """Note the versions, the GPU, and how gradients travel."""
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            raise RuntimeError("TensorFlow sees no GPU: its messages say which library is missing")
        name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "unknown")
        self._rows.note("versions", f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {name}")
        self._rows.note("XLA", os.environ.get("TF_XLA_FLAGS", "as compiled"))
        self._rows.note("gradients go", current().engine.use_device())

    def other_modes(self) -> None:
        """Train in the modes that are other algorithms, and with int8 and PowerSGD."""
        for what, overlap, options in (
            ('overlap="stale"', "stale", {"warmup_steps": 2}),
            ('overlap="local"', "local", {"every": 2}),
            ('compression="int8"', "step", {"compression": "int8", "warmup_steps": 2}),
            ('compression="powersgd:2"', "step", {"compression": "powersgd:2", "warmup_steps": 2}),
        ):
            weights = trained(convolutions, overlap, **options)
            everyone = hvpipe.allgather_object(bits_of(weights))
            equal = len(set(everyone)) == 1
            finite = all(np.isfinite(weight).all() for weight in weights)
            self._rows.note(what, "all ranks equal" if equal and finite else "RANKS DIFFER", equal and finite)

    def whole_batch(self, what: str, build: Callable[[], keras.Model]) -> None:
        """Compare with plain Keras, which trains on the batches of all ranks together."""
        found = trained(build, "step")
        error = 0.0
        if hvpipe.rank() == 0:
            plain = trained(build, None)
            error = max(float(np.abs(a - b).max()) for a, b in zip(found, plain, strict=True))
        self._rows.verified(what, [error], 2e-4)

    def pipeline(self, what: str, stages: int) -> None:
        """Compare the losses of stages, or of replicas of one stage, with those of plain Keras."""

        def losses(model: keras.Model) -> list[float]:
            data = batches(convolutions, 0, 1)
            return [float(one) for one in model.fit(data, epochs=3, verbose=0).history["loss"]]

        def build() -> keras.Model:
            keras.utils.set_random_seed(3)
            return convolutions()

        pipe = compiled(hk.pipeline_parallel(build(), stages, microbatches=4))
        found = losses(pipe)
        plain = losses(compiled(build())) if hvpipe.rank() == 0 else found
        self._rows.verified(what, [max(abs(a - b) for a, b in zip(found, plain, strict=True))], 1e-4)

    def step_time(self, *runs: tuple[str | None, bool]) -> None:
        """Time steps of ResNet-50, all ranks at once, for each overlap (None: plain Keras), with XLA or not.

        TF_XLA_FLAGS=--tf_xla_auto_jit=2 gives XLA to several ranks.
        """
        x = tf.random.normal((64, 96, 96, 3))
        y = tf.zeros((64,), tf.int32)
        data = tf.data.Dataset.from_tensors((x, y)).repeat()
        for overlap, xla in runs:
            keras.utils.set_random_seed(3)
            model = keras.applications.ResNet50(weights=None, input_shape=(96, 96, 3), classes=1000)
            loss = keras.losses.SparseCategoricalCrossentropy()
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=xla)
            if overlap is not None:
                model = hk.data_parallel(model, overlap)
            times: list[float] = []
            note = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs, times=times: times.append(time.perf_counter())
            )
            note.reads_weights = False
            hvpipe.barrier()
            model.fit(data, steps_per_epoch=self._steps, verbose=0, callbacks=[note])
            steps = np.diff(times[self._steps // 4 :])
            middle = max(hvpipe.allgather_object(statistics.median(steps)))
            how = "alone, jit_compile=True" if xla else overlap or "alone"
            self._rows.note(f"ResNet-50, 64 images of 96 px, {how}", f"{middle * 1e3:.1f} ms a step")


def main() -> int:
    tf.config.experimental.enable_op_determinism()
    os.environ["HVPIPE_TABLE_BYTES"] = "1000000"  # the rows of `embedded` go through the host
    hvpipe.init()
    rows = Rows(Path(sys.argv[1]), judged=True)
    check = Check(rows, 12 if sys.argv[2:] == ["small"] else 40)
    rows.part(check.facts)
    for what, build, options in COMPARED:
        rows.part(partial(check.compare, what, build, **options), what)
    for name, build in (("convolutions", convolutions), ("Embedding", embedded)):
        what = f"{name}, against plain Keras on the whole batch"
        rows.part(partial(check.whole_batch, what, build), what)
    rows.part(check.other_modes)
    rows.part(partial(check.step_time, *((overlap, False) for overlap in (None, "none", *MODES))), "steps")
    if hvpipe.size() > 1:  # last, because this never ran on a GPU
        for stages in (hvpipe.size(), 1):
            what = f"pipeline of {stages} stages, against plain Keras"
            rows.part(partial(check.pipeline, what, stages), what)
    rows.part(partial(check.step_time, (None, True)), "steps with XLA")
    hvpipe.shutdown()
    return int(rows.failed or any(row["ok"] is False for row in rows.found))


if __name__ == "__main__":
    sys.exit(main())
