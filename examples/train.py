"""Train an image classifier on every rank at once: handwritten digits, or your own folders of images.

    hvpipe run -np 2 examples/train.py
    hvpipe run -np 2 examples/train.py --model resnet50 --data photos --pixels 128 --save photos.keras

Without `--data` it learns scikit-learn's 1,797 digits of 8x8 pixels. With `--data DIR`, each folder in DIR is
a class. A fifth of the images is held out for testing. Without a launcher the script runs on one rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers

import hvpipe
import hvpipe.keras as hk

HELD_OUT = 0.2
BATCH_OF_RATE = 64  # `--rate` is for this many images a step; the learning rate grows with their number


@dataclass(frozen=True)
class Images:
    """Batches of (image, label), the same on every rank. Pixels are 0 to 255."""

    name: str
    train: tf.data.Dataset
    test: tf.data.Dataset
    held_out: int  # images in test
    shape: tuple[int, int, int]
    classes: int


def digits(batch: int, seed: int) -> Images:
    """Load scikit-learn's handwritten digits, and hold out a stratified fifth."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels * (255 / 16)).astype("float32").reshape(-1, 8, 8, 1)
    train_x, test_x, train_y, test_y = train_test_split(
        images, labels, test_size=HELD_OUT, random_state=seed, stratify=labels
    )
    train = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    train = train.shuffle(len(train_x), seed=seed).batch(batch, drop_remainder=True)
    test = tf.data.Dataset.from_tensor_slices((test_x, test_y)).batch(batch)
    return Images("digits", train, test, len(test_x), images.shape[1:], classes=10)


def folders(directory: Path, pixels: int, batch: int, seed: int) -> Images:
    """Load images from folders, one class for each folder in `directory`."""
    train, test = keras.utils.image_dataset_from_directory(
        directory,
        validation_split=HELD_OUT,
        subset="both",
        seed=seed,
        image_size=(pixels, pixels),
        batch_size=batch,
        verbose=False,
    )
    held_out = len(test.file_paths)
    return Images(directory.name, train, test, held_out, (pixels, pixels, 3), len(train.class_names))


def residual_block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    """Add two 3x3 convolutions beside a shortcut."""
    shortcut = x
    if strides != 1 or x.shape[-1] != filters:
        shortcut = layers.Conv2D(filters, 1, strides=strides, use_bias=False)(x)
        shortcut = layers.BatchNormalization(momentum=0.9)(shortcut)
    x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(layers.add([shortcut, x]))


def small_resnet(x: keras.KerasTensor, width: int = 16) -> keras.KerasTensor:
    """Add seven convolutions with 80,000 weights: enough for digits, quick on a laptop."""
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    for filters, strides in ((width, 1), (2 * width, 2), (4 * width, 2)):
        x = residual_block(x, filters, strides)
    return layers.GlobalAveragePooling2D()(x)


MODELS = {
    "resnet": None,
    "resnet50": keras.applications.ResNet50,
    "vgg16": keras.applications.VGG16,
    "mobilenetv2": keras.applications.MobileNetV2,
}


def build_model(name: str, shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Build a classifier for images of this shape. The model scales and shifts them itself."""
    inputs = keras.Input(shape)
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.RandomTranslation(0.1, 0.1, fill_mode="constant")(x)
    application = MODELS[name]
    if application is None:
        x = small_resnet(x)
    else:
        x = application(include_top=False, weights=None, input_shape=shape, pooling="avg")(x)
    return keras.Model(inputs, layers.Dense(classes)(x), name=name)


def my_images(dataset: tf.data.Dataset, images: int, batch: int) -> tf.data.Dataset:
    """Shard a dataset image by image, so that no image is left out."""
    mine = len(range(hvpipe.rank(), images, hvpipe.size()))
    part = dataset.unbatch().shard(hvpipe.size(), hvpipe.rank()).batch(batch)
    return part.apply(tf.data.experimental.assert_cardinality(-(-mine // batch)))  # unbatch loses it


def learning_rate(options: argparse.Namespace, steps: int) -> keras.optimizers.schedules.CosineDecay:
    """Decay to zero from a rate in proportion to the images that all ranks take in one step."""
    rate = options.rate * options.batch * hvpipe.size() / BATCH_OF_RATE
    return keras.optimizers.schedules.CosineDecay(rate, steps)


def verbosity(progress: str) -> int:
    """Return fit's `verbose`: on rank 0 a bar on a terminal, else a line for each epoch; 0 on other ranks."""
    if hvpipe.rank() != 0 or progress == "none":
        return 0
    return 1 if progress == "bar" and sys.stdout.isatty() else 2


def train(options: argparse.Namespace) -> tuple[keras.Model, str]:
    """Train on all ranks. Return the model and one line with its accuracy and speed."""
    keras.utils.set_random_seed(options.seed)
    if options.data is None:
        images = digits(options.batch, options.seed)
    else:
        images = folders(options.data, options.pixels, options.batch, options.seed)
    mine = hk.shard(images.train)
    steps = len(mine) * options.epochs

    model = build_model(options.model, images.shape, images.classes)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rate(options, steps), momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = hk.data_parallel(
        model, overlap=options.overlap, every=options.every, compression=options.compression
    )

    mine_of_test = my_images(images.test, images.held_out, options.batch)

    callbacks = []
    if options.checkpoint is not None:  # after the end of a job, the next one goes on from there
        callbacks.append(hk.Checkpoint(options.checkpoint, every="1epoch"))
    started = time.perf_counter()
    history = model.fit(
        mine,
        validation_data=mine_of_test,
        epochs=options.epochs,
        callbacks=callbacks,
        shuffle=False,  # the dataset shuffles
        verbose=verbosity(options.progress),
    )
    elapsed_s = time.perf_counter() - started
    tested = model.evaluate(images.test, return_dict=True, verbose=0)  # every rank tests all images

    ranks = "1 rank" if hvpipe.size() == 1 else f"{hvpipe.size()} ranks"
    rate = len(mine) * len(history.epoch) * options.batch * hvpipe.size() / elapsed_s
    return model, (
        f"{options.model} on {images.name}, {ranks}, overlap={options.overlap}: "
        f"test accuracy {tested['accuracy']:.2%} after {options.epochs} epochs, "
        f"{elapsed_s:.1f} s, {rate:.0f} images/s"
    )


def main() -> None:
    """Train and save the model. Rank 0 prints the result and the files."""
    options = parse()
    hvpipe.init()
    model, summary = train(options)
    first, trace = hvpipe.rank() == 0, hvpipe.trace_path()
    if first and options.save is not None:
        options.save.parent.mkdir(parents=True, exist_ok=True)
        model.save(options.save)
    hvpipe.shutdown()  # writes the trace
    if first:
        print(summary)
        if options.save is not None:
            print(f"saved model: {options.save}")
        if trace is not None:
            print(f"trace: {trace} (open it in ui.perfetto.dev)")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="resnet", help="default: a small ResNet")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder with one folder of images for each class"
    )
    parser.add_argument(
        "--pixels", type=int, default=64, help="scale the images of --data to this width and height (64)"
    )
    parser.add_argument("--overlap", choices=("none", "backward", "step", "stale", "local"), default="step")
    parser.add_argument("--every", type=int, help="steps of a round of --overlap local (16)")
    parser.add_argument(
        "--compression", metavar="NAME", help="send gradients as bf16, fp16, int8 or powersgd:R"
    )
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="images of one rank in one step (32)")
    parser.add_argument(
        "--rate", type=float, default=0.1, help=f"learning rate for {BATCH_OF_RATE} images a step (0.1)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--save", type=Path, metavar="FILE.keras", help="where rank 0 saves the trained model"
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="save each epoch there, and resume from what is there"
    )
    parser.add_argument(
        "--progress", choices=("bar", "epoch", "none"), default="bar", help="what rank 0 prints"
    )
    options = parser.parse_args(arguments)
    if options.data is None and options.model != "resnet":
        parser.error(
            f"wanted: --data DIR, as digits are too small for this model. Received: --model {options.model}"
        )
    if options.data is not None and not options.data.is_dir():
        parser.error(f"wanted: a folder of folders of images. Received: --data {options.data}")
    if options.save is not None and options.save.suffix != ".keras":
        parser.error(f"wanted: a name that ends in .keras. Received: --save {options.save}")
    if options.overlap == "local" and options.every is None:
        options.every = 16
    for name in ("epochs", "batch", "pixels"):
        if getattr(options, name) < 1:
            parser.error(f"wanted: 1 or more. Received: --{name} {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
