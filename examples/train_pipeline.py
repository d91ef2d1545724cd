"""Train a model spread over the ranks: a small GPT on Python's source, or ResNet-50 on digits.

    hvpipe run -np 2 examples/train_pipeline.py
    hvpipe run -np 4 examples/train_pipeline.py --schedule zb-h1 --microbatches 8
    hvpipe run -np 3 examples/train_pipeline.py --stages 2 --replicas 2,1
    hvpipe run -np 2 examples/train_pipeline.py --model resnet50 --pixels 64 --recompute

To plan the stages from a measurement:

    hvpipe profile examples/train_pipeline.py:default_gpt -np 2 --microbatch 8
    hvpipe plan profile.json --cluster cluster.json --microbatches 4 -o plan.json
    hvpipe run -np 2 examples/train_pipeline.py --plan plan.json

The GPT learns modules of the standard library letter by letter; ResNet-50 learns scikit-learn's digits.
Each rank holds only the weights of its own layers. Without a launcher, the script runs on one rank.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import hvpipe
import hvpipe.keras as hk

LETTERS = 128  # ASCII
MODULES = ("argparse", "ast", "datetime", "inspect", "pickle", "statistics", "subprocess", "zipfile")


@dataclass(frozen=True)
class Task:
    """Endless batches of (x, y), the same on every rank, and a model that learns them."""

    train: tf.data.Dataset
    build_model: Callable[[], keras.Model]
    optimizer: keras.optimizers.Optimizer


# A GPT on text --------------------------------------------------------------------------------------


def text() -> np.ndarray:
    """Return modules of the standard library, concatenated, as numbers of letters."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [folder / f"{name}.py" for name in MODULES]
    letters = b"".join(path.read_bytes() for path in paths if path.is_file())
    return np.frombuffer(letters, np.uint8).astype(np.int32) % LETTERS


def excerpts(length: int, batch: int, seed: int) -> tf.data.Dataset:
    """Return batches of excerpts of the text; y is x, shifted by one letter."""
    letters = tf.constant(text())
    count = int(letters.shape[0]) - length

    def pair(start: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        excerpt = letters[start : start + length + 1]
        return excerpt[:-1], excerpt[1:]

    starts = tf.data.Dataset.range(count).shuffle(count, seed=seed).repeat()
    return starts.map(pair).batch(batch, drop_remainder=True)


def block(x: keras.KerasTensor, heads: int) -> keras.KerasTensor:
    """Apply a transformer block: causal attention, then two Dense layers, each with a skip connection."""
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(heads, width // heads)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * width, activation="gelu")(y)
    return x + layers.Dense(width)(y)


def gpt(length: int, width: int, blocks: int, heads: int, tied: bool) -> keras.Model:
    """Return a GPT: logits of the next letter at every position; `tied` reads and writes with one table."""
    x = keras.Input((length,), dtype="int32")
    table = layers.ReversibleEmbedding(LETTERS, width) if tied else layers.Embedding(LETTERS, width)
    positions = keras.ops.cumsum(keras.ops.ones_like(x), axis=1) - 1
    y = table(x) + layers.Embedding(length, width)(positions)
    for _ in range(blocks):
        y = block(y, heads)
    y = layers.LayerNormalization()(y)
    return keras.Model(x, table(y, reverse=True) if tied else layers.Dense(LETTERS)(y), name="gpt")


def default_gpt() -> keras.Model:
    """Return the GPT of the default options, for `hvpipe profile`, which passes no arguments."""
    options = parse([])
    return gpt(options.length, options.width, options.blocks, options.heads, options.tied)


# ResNet-50 on images --------------------------------------------------------------------------------


def digits(pixels: int, batch: int, seed: int) -> tf.data.Dataset:
    """Return batches of scikit-learn's handwritten digits and labels, enlarged, with three channels."""
    from sklearn.datasets import load_digits

    x, labels = load_digits(return_X_y=True)
    images = (x / 16).astype("float32").reshape(-1, 8, 8, 1)
    data = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(x), seed=seed)

    def enlarge(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.repeat(tf.image.resize(x, (pixels, pixels)), 3, axis=-1), y

    return data.repeat().batch(batch, drop_remainder=True).map(enlarge)


def resnet50(pixels: int) -> keras.Model:
    """Return ResNet-50 with ten classes."""
    shape = (pixels, pixels, 3)
    inputs = keras.Input(shape)
    features = keras.applications.ResNet50(include_top=False, weights=None, input_shape=shape, pooling="avg")(
        inputs
    )
    return keras.Model(inputs, layers.Dense(10)(features), name="resnet50")


# Training -------------------------------------------------------------------------------------------


def task(options: argparse.Namespace) -> Task:
    """Return data, model and optimizer for the options."""
    if options.model == "resnet50":
        data = digits(options.pixels, options.batch, options.seed)
        return Task(data, partial(resnet50, options.pixels), keras.optimizers.Adam(1e-3))
    data = excerpts(options.length, options.batch, options.seed)
    build = partial(gpt, options.length, options.width, options.blocks, options.heads, options.tied)
    return Task(data, build, keras.optimizers.Adam(2e-3, global_clipnorm=1.0))


def describe(pipe: hk.PipelineParallel) -> str:
    """Return a line about this rank's stages: their layers, and the bytes of their weights."""
    names = [
        pipe.stages.graph.calls[index].name for s in pipe.stage_numbers for index in pipe.stages.cuts[s].calls
    ]
    nbytes = sum(int(np.prod(w.shape)) * tf.as_dtype(w.dtype).size for w in pipe.weights)
    stages = "stage " if len(pipe.stage_numbers) == 1 else "stages "
    stages += ", ".join(map(str, pipe.stage_numbers))
    return (
        f"rank {hvpipe.rank()}: {stages} of {len(pipe.stages.cuts)}: {len(names)} layer calls, {names[0]} to "
        f"{names[-1]}, {nbytes / 1e6:.2f} MB of weights"
    )


def train(options: argparse.Namespace) -> tuple[hk.PipelineParallel, str]:
    """Train on all ranks together; return the pipeline, and a line with losses and speed."""
    keras.utils.set_random_seed(options.seed)
    chosen = task(options)
    pipe = hk.pipeline_parallel(
        chosen.build_model,
        stages=options.plan or options.stages or "auto",
        microbatches=options.microbatches or (None if options.plan else 4),
        schedule=options.schedule,
        chunks=options.chunks,
        replicas=options.replicas,
        recompute=options.recompute,
    )
    pipe.compile(
        optimizer=chosen.optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    descriptions = hvpipe.allgather_object(describe(pipe))
    if hvpipe.rank() == 0:
        print("\n".join(descriptions), flush=True)

    epoch_starts_s: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch_starts_s.append(time.perf_counter())
    )
    history = pipe.fit(
        chosen.train,
        steps_per_epoch=options.steps,
        epochs=options.epochs,
        callbacks=[clock],
        shuffle=False,  # the dataset shuffles
        verbose=verbosity(options.progress),
    ).history
    # Do not time the first epoch, which builds the graphs, unless it is the only one.
    first = 1 if options.epochs > 1 else 0
    samples = (options.epochs - first) * options.steps * options.batch
    rate = samples / (time.perf_counter() - epoch_starts_s[first])
    losses = history["loss"]
    ranks = "1 rank" if hvpipe.size() == 1 else f"{hvpipe.size()} ranks"
    return pipe, (
        f"{options.model} on {ranks}, {len(pipe.stages.cuts)} stages: loss {losses[0]:.3f} in the first "
        f"epoch, {losses[-1]:.3f} in the last, {rate:.1f} samples/s"
    )


def verbosity(progress: str) -> int:
    """Return Keras's `verbose`: a progress bar on a terminal, otherwise a line for each epoch."""
    if progress == "none":
        return 0
    return 1 if progress == "bar" and sys.stdout.isatty() else 2


def main() -> None:
    """Train and save; rank 0 prints a summary and the path of the saved model."""
    options = parse()
    hvpipe.init()
    if options.save is not None and hvpipe.rank() == 0:
        options.save.parent.mkdir(parents=True, exist_ok=True)
    pipe, summary = train(options)
    if options.save is not None:
        pipe.save(options.save)  # on all ranks: each has its own layers' weights
    first = hvpipe.rank() == 0
    hvpipe.shutdown()  # writes the trace
    if first:
        print(summary)
        if options.save is not None:
            print(f"saved model: {options.save}")


def numbers(text: str) -> list[int]:
    """Parse '2,1' as [2, 1]."""
    return [int(part) for part in text.split(",")]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=("gpt", "resnet50"), default="gpt", help="default: gpt")
    how = parser.add_argument_group("how it is spread over the ranks")
    how.add_argument("--stages", type=int, metavar="N", help="number of stages (one on each rank)")
    how.add_argument("--microbatches", type=int, metavar="M", help="micro-batches of a batch (4)")
    how.add_argument("--schedule", help="gpipe, 1f1b (default), eager-1f1b, zb-h1 or interleaved")
    how.add_argument("--chunks", type=int, help="stages on each rank, if interleaved (2)")
    how.add_argument("--replicas", type=numbers, metavar="2,1", help="number of ranks of each stage")
    how.add_argument(
        "--recompute", action="store_const", const=True, help="run forwards again instead of keeping them"
    )
    how.add_argument(
        "--plan", type=Path, metavar="FILE", help="a plan from `hvpipe plan -o FILE`, instead of the above"
    )
    shape = parser.add_argument_group("the model")
    shape.add_argument("--length", type=int, default=64, help="letters in an excerpt (64)")
    shape.add_argument("--width", type=int, default=64, help="size of a letter's embedding (64)")
    shape.add_argument("--blocks", type=int, default=4, help="transformer blocks (4)")
    shape.add_argument("--heads", type=int, default=4, help="attention heads (4)")
    shape.add_argument("--tied", action="store_true", help="read and write letters with one table")
    shape.add_argument("--pixels", type=int, default=32, help="width and height of ResNet-50's digits (32)")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (5)")
    parser.add_argument("--steps", type=int, default=20, help="steps in an epoch (20)")
    parser.add_argument("--batch", type=int, default=32, help="samples in a step (32)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (1)")
    parser.add_argument("--save", type=Path, metavar="FILE.keras", help="where to save the trained model")
    parser.add_argument(
        "--progress", choices=("bar", "epoch", "none"), default="bar", help="what rank 0 prints"
    )
    options = parser.parse_args(arguments)
    for name in ("length", "width", "blocks", "heads", "pixels", "epochs", "steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"wanted: 1 or more. Received: --{name} {getattr(options, name)}")
    if options.width % options.heads:
        parser.error(f"wanted: a width that the heads divide. Received: --width {options.width}")
    if options.model == "resnet50" and options.pixels < 32:
        parser.error(f"wanted: 32 pixels or more for ResNet-50. Received: --pixels {options.pixels}")
    if options.save is not None and options.save.suffix != ".keras":
        parser.error(f"wanted: a name that ends in .keras. Received: --save {options.save}")
    return options


if __name__ == "__main__":
    main()
