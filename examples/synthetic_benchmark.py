"""Images per second of a Keras application on random data, as Horovod's synthetic benchmark measures it.

    hvpipe run -np 2 examples/synthetic_benchmark.py --model ResNet50 --batch-size 8 --image-size 64

Written for Horovod, apart from the import: replace `hvpipe.horovod` by `horovod`, and it runs there.
"""

from __future__ import annotations

import argparse
import timeit
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvpipe.horovod.tensorflow as hvd


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Images per second on random data.")
    parser.add_argument("--model", default="ResNet50", help="a model of keras.applications")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps before the measurement")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps of a measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    args = parser.parse_args()
    if not hasattr(keras.applications, args.model):
        parser.error(f"--model should be a model of keras.applications. Received: {args.model}")
    return args


def main() -> None:
    args = parsed()
    hvd.init()
    gpus = [] if args.no_cuda else tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_visible_devices(gpus[hvd.local_rank() : hvd.local_rank() + 1], "GPU")

    shape = (args.image_size, args.image_size, 3)
    model = getattr(keras.applications, args.model)(weights=None, input_shape=shape)
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    images = tf.random.uniform([args.batch_size, *shape])
    labels = tf.random.uniform([args.batch_size, 1], 0, 1000, tf.int64)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def say(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    device = "GPU" if gpus else "CPU"
    say(f"Model: {args.model}")
    say(f"Batch size: {args.batch_size}")
    say(f"Number of {device}s: {hvd.size()}")
    step()
    hvd.broadcast_variables([v.value for v in [*model.variables, *optimizer.variables]], root_rank=0)
    say("Running warmup...")
    for _ in range(args.num_warmup_batches):
        step()
    say("Running benchmark...")
    rates = []
    for iteration in range(args.num_iters):
        seconds = timeit.timeit(lambda: step().numpy(), number=args.num_batches_per_iter)
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        say(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {device}")
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    say(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    say(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


if __name__ == "__main__":
    main()
