"""What the evaluation trains: models, their data, their optimizer. The code is the same for every system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bench.errors import BenchError
from bench.rounds.job import RankJob
from bench.rounds.record import Task
from bench.training import datasets
from bench.training.datasets import DATASETS, Dataset

_CLASSES = 100
_TOKENS, _WORDS = 100, 50_000  # vocabularies of the transformer and of the text classifier


@dataclass(frozen=True)
class Workload:
    """A model and its data: made up, or one of DATASETS, which trains by epochs.

    `build(keras, pixels)` makes the model; `least_pixels` is its smallest input. `adam_warm_up` is None for
    SGD with momentum, or how many steps Adam's learning rate takes to grow to `rate`.
    """

    title: str
    build: Callable[[Any, int], Any]
    data: str | int  # "images", the vocabulary of random texts, or a name of DATASETS
    rate: float = 0.01
    least_pixels: int = 1
    adam_warm_up: int | None = None


def _application(name: str) -> Callable[[Any, int], Any]:
    def build(keras: Any, pixels: int) -> Any:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(pixels, pixels, 3), classes=_CLASSES)

    return build


def _transformer_trunk(keras: Any, length: int, tokens: int, width: int, blocks: int) -> tuple[Any, Any]:
    """Return the input and the last block's output of pre-norm causal attention over `length` tokens."""
    layers = keras.layers
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(tokens, width)(inputs)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, width // 4)(y, y, use_causal_mask=True)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return inputs, layers.LayerNormalization()(x)


def _transformer(keras: Any, length: int) -> Any:
    """Build a classifier of sequences of tokens."""
    inputs, x = _transformer_trunk(keras, length, _TOKENS, width=256, blocks=6)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES, activation="softmax")(x), name="transformer")


def _text(keras: Any, length: int) -> Any:
    """Build a classifier of texts: 51 MB of weights in one Embedding, 12 MB in all other layers."""
    layers = keras.layers
    inputs = keras.Input((length,), dtype="int32")
    x = layers.Embedding(_WORDS, 256)(inputs)
    for width in (512, 1024):
        x = layers.Conv1D(width, 5, padding="same", activation="relu")(x)
    x = layers.GlobalMaxPooling1D()(x)
    return keras.Model(inputs, layers.Dense(_CLASSES, activation="softmax")(x), name="text")


def _digits(keras: Any, pixels: int) -> Any:
    """Build a model without batch normalisation and dropout, whose state systems treat differently."""
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(64, 3, padding="same", activation="relu")(x)
    x = layers.Dense(64, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x), name="digits")


def _digits_norm(keras: Any, pixels: int) -> Any:
    """Build a small residual network with batch normalisation."""
    layers = keras.layers

    def convolved(x: Any, filters: int) -> Any:
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9)(x)

    inputs = keras.Input((8, 8, 1))
    x = layers.ReLU()(convolved(inputs, 64))
    for _ in range(2):
        y = layers.ReLU()(convolved(x, 64))
        x = layers.ReLU()(layers.Add()([x, convolved(y, 64)]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x), name="digits_norm")


def _prose(keras: Any, length: int) -> Any:
    inputs, x = _transformer_trunk(keras, length, datasets.CHARACTERS, width=128, blocks=2)
    outputs = keras.layers.Dense(datasets.CHARACTERS, activation="softmax")(x)
    return keras.Model(inputs, outputs, name="prose")


def _table(keras: Any, pixels: int) -> Any:
    inputs = x = keras.Input((datasets.FEATURES,))
    for _ in range(2):
        x = keras.layers.Dense(256, activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(datasets.CLASSES, activation="softmax")(x), name="table")


WORKLOADS: dict[str, Workload] = {
    "resnet50": Workload("ResNet-50", _application("ResNet50"), "images", least_pixels=32),
    "vgg16": Workload("VGG-16", _application("VGG16"), "images", least_pixels=32),
    "mobilenetv2": Workload("MobileNetV2", _application("MobileNetV2"), "images", least_pixels=32),
    "transformer": Workload("transformer, a classifier of sequences", _transformer, _TOKENS),
    "text": Workload("text classifier with a large Embedding", _text, _WORDS),
    "digits": Workload("handwritten digits, small CNN", _digits, "digits", rate=0.05),
    "prose": Workload("characters of a manual, small transformer", _prose, "prose", rate=0.05),
    "digits-norm": Workload(
        "handwritten digits, small residual CNN with batch normalisation", _digits_norm, "digits", rate=0.05
    ),
    "prose-adam": Workload(
        "characters of a manual, small transformer, Adam with warm-up",
        _prose,
        "prose",
        rate=0.002,
        adam_warm_up=40,
    ),
    "table": Workload("table of numbers, dense layers", _table, "table", rate=0.02),
}


def check(task: Task) -> None:
    """Raise BenchError, which says what is wanted, if a task cannot be trained."""
    workload = WORKLOADS.get(task.workload)
    if workload is None:
        names = ", ".join(WORKLOADS)
        raise BenchError(f"The workload must be one of {names}. Received: workload={task.workload!r}")
    if task.pixels < workload.least_pixels:
        raise BenchError(
            f"{workload.title} needs {workload.least_pixels} pixels. Received: pixels={task.pixels}"
        )
    if task.epochs and workload.data not in DATASETS:
        names = ", ".join(name for name, each in WORKLOADS.items() if each.data in DATASETS)
        raise BenchError(f"Workloads that train epochs are {names}. Received: workload={task.workload!r}")
    if min(task.batch, task.threads, task.steps, task.warm_up) < 1:
        raise BenchError(f"Batch, threads, steps and warm-up must be at least 1. Received: {task}")
    if min(task.epochs, task.more_epochs, task.seed) < 0:
        raise BenchError(f"Epochs and the seed must be at least 0. Received: {task}")


def make_model(keras: Any, task: Task) -> Any:
    """Return the model, with the same weights each time."""
    keras.utils.set_random_seed(task.seed)
    return WORKLOADS[task.workload].build(keras, task.pixels)


def make_optimizer(keras: Any, task: Task) -> Any:
    workload = WORKLOADS[task.workload]
    if workload.adam_warm_up is None:
        return keras.optimizers.SGD(workload.rate, momentum=0.9)
    forever = 10**9  # the schedule's cosine is flat within any training here
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, forever, warmup_target=workload.rate, warmup_steps=workload.adam_warm_up
    )
    return keras.optimizers.Adam(schedule)


def compiled_model(keras: Any, task: Task, jit_compile: bool | str = False) -> Any:
    """Return the model ready for `fit`."""
    model = make_model(keras, task)
    loss = keras.losses.SparseCategoricalCrossentropy()
    model.compile(optimizer=make_optimizer(keras, task), loss=loss, jit_compile=jit_compile)
    return model


def loss_of(keras: Any, model: Any, batch: tuple[Any, Any], training: bool = True) -> Any:
    """Return the mean loss of a batch, as `fit` minimises it, for hand-written loops."""
    x, y = batch
    return keras.losses.SparseCategoricalCrossentropy()(y, model(x, training=training))


def train_whole_steps(job: RankJob) -> None:
    """In epochs, let this process train on all samples of each step, as the ranks would together.

    Each of several independent processes then does all the work, so their steps are no reference for time.
    """
    if job.task.epochs:
        job.task = replace(job.task, batch=job.samples)
        job.rank, job.size = 0, 1


def runs_of(job: RankJob) -> list[tuple[int, int, bool]]:
    """Return what is trained, one run after the other: epochs, steps of each, and whether they are timed.

    In a run of epochs the first steps do not count; see StepWatch.
    """
    if job.task.epochs == 0:
        return [(1, job.task.warm_up, False), (1, job.task.steps, True)]
    return [(job.task.all_epochs, _steps_of_epoch(job), False)]


def dataset_of(workload: str) -> Dataset:
    """Return the data of a workload that can train epochs."""
    return DATASETS[str(WORKLOADS[workload].data)]


def _steps_of_epoch(job: RankJob) -> int:
    return dataset_of(job.task.workload).trained // job.samples


def batches_of(job: RankJob, rank: int | None = None) -> Any:
    """Return an endless dataset of the batches of a rank (default: this one). Reading costs nothing."""
    import tensorflow as tf

    rank = job.rank if rank is None else rank
    if job.task.epochs:
        data = tf.data.Dataset.from_tensor_slices(_epochs_of_rank(job, rank)).batch(job.task.batch)
    else:
        data = tf.data.Dataset.from_tensors(synthetic(job.task, job.task.batch, rank))
    return endless(data)


def same_batch(job: RankJob) -> tuple[Any, Any]:
    """Return the batch that this rank trains on in every step, as arrays of NumPy."""
    return synthetic(job.task, job.task.batch, job.rank)


def endless(data: Any) -> Any:
    """Return the dataset, repeated for ever. Reading it takes no time from a step."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False  # its thread delays the end of `fit` by up to 10 s
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return data.repeat().prefetch(2).with_options(options)


def evaluator(keras: Any, model: Any, job: RankJob) -> Callable[[], tuple[float, float]] | None:
    """Return a function that computes loss and accuracy on the held-out examples; None without epochs."""
    if not job.task.epochs:
        return None
    import tensorflow as tf

    _, _, x, y = dataset_of(job.task.workload).split(job.task.seed)
    held_out = tf.constant(x), tf.constant(y)

    @tf.function(jit_compile=False)
    def evaluate(batch: Any) -> Any:
        found = model(batch[0], training=False)
        right = tf.equal(tf.argmax(found, axis=-1, output_type=tf.int32), batch[1])
        return keras.losses.SparseCategoricalCrossentropy()(batch[1], found), tf.reduce_mean(
            tf.cast(right, tf.float32)
        )

    def loss_and_accuracy() -> tuple[float, float]:
        loss, accuracy = evaluate(held_out)
        return float(loss), float(accuracy)

    return loss_and_accuracy


def synthetic(task: Task, batch: int, rank: int) -> tuple[Any, Any]:
    """Return one batch, a different one on each rank."""
    import numpy as np

    random = np.random.default_rng(100 * task.seed + rank)
    kind = WORKLOADS[task.workload].data
    if kind in DATASETS:
        x, y = DATASETS[kind].load()
        chosen = random.integers(0, len(x), batch)
        return x[chosen], y[chosen]
    if isinstance(kind, int):
        words = random.integers(0, kind, (batch, task.pixels)).astype(np.int32)
        return words, random.integers(0, _CLASSES, batch).astype(np.int32)
    x = random.standard_normal((batch, task.pixels, task.pixels, 3), dtype=np.float32)
    return x, random.integers(0, _CLASSES, batch).astype(np.int32)


def _epochs_of_rank(job: RankJob, rank: int) -> tuple[Any, Any]:
    """Return a rank's examples of all epochs in order: shuffled anew, each step's shared out by rank."""
    import numpy as np

    x, y, _, _ = dataset_of(job.task.workload).split(job.task.seed)
    epochs, steps = job.task.all_epochs, _steps_of_epoch(job)
    used = steps * job.samples
    order = []
    for epoch in range(epochs):
        shuffled = np.random.default_rng(1000 * job.task.seed + epoch).permutation(len(x))[:used]
        order.append(shuffled.reshape(steps, job.size, job.task.batch)[:, rank].reshape(-1))
    chosen = np.concatenate(order)
    return x[chosen], y[chosen]
