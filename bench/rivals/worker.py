"""A rank of a small training on one of the libraries, which is used as its own pages show.

    python -m bench.rivals.worker LIBRARY CASE RANK SIZE ADDRESS FILE

Its weights go to FILE.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from bench.systems.torch_ddp import step_of

STEPS, WHOLE = 8, 32  # samples of all ranks in a step
KILLED_AT = 3
_FEATURES, _CLASSES = 12, 5


def batches(case: str, rank: int, size: int) -> list[tuple[Any, Any]]:
    """Return this rank's batches; one rank has those of all together."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, WHOLE, _FEATURES)).astype(np.float32)
    y = np.argmax(x[:, :, :_CLASSES], axis=2).astype(np.int32)
    bounds = [0, WHOLE] if size == 1 else [0, 24 if case == "unequal" else 16, WHOLE]
    mine = slice(bounds[rank], bounds[rank + 1])
    return [(x[step, mine], y[step, mine]) for step in range(STEPS)]


def make_model(keras: Any, case: str) -> Any:
    """Return a compiled model, the same on all ranks."""
    keras.utils.set_random_seed(1)
    between = [keras.layers.BatchNormalization()] if case == "batchnorm" else []
    hidden = keras.layers.Dense(16, activation="tanh")
    model = keras.Sequential([keras.Input((_FEATURES,)), hidden, *between, keras.layers.Dense(_CLASSES)])
    model.compile(
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def die_at(case: str, rank: int, step: int) -> None:
    """End rank 1 in the middle of the training, if the case says so."""
    if case == "killed" and rank == 1 and step == KILLED_AT:
        os.kill(os.getpid(), signal.SIGKILL)


def fit(keras: Any, model: Any, case: str, rank: int, data: list[tuple[Any, Any]]) -> None:
    """Train by `fit`, without TensorFlow's datasets."""

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> object:
            die_at(case, rank, index)
            return data[index]

    model.fit(Batches(), epochs=1, shuffle=False, verbose=0)


def on_torch(case: str, rank: int, size: int, address: str) -> Any:
    import keras
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=size)
    model = make_model(keras, case)
    data = batches(case, rank, size)
    if case == "fit":
        # Keras' trainer calls the model itself, not its wrapper.
        torch.nn.parallel.DistributedDataParallel(model)
        fit(keras, model, case, rank, data)
        return model
    wrapped, optimizer = torch.nn.parallel.DistributedDataParallel(model), model.optimizer
    optimizer.build(model.trainable_variables)
    train = step_of(model, wrapped, optimizer, model.loss)
    for step, batch in enumerate(data):
        die_at(case, rank, step)
        train(tuple(map(torch.from_numpy, batch)))
    return model


def on_jax(case: str, rank: int, size: int, address: str) -> Any:
    import keras

    if size > 1:
        keras.distribution.initialize(address, size, rank)
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    model = make_model(keras, case)
    fit(keras, model, case, rank, batches(case, rank, size))
    return model


def on_hvpipe(case: str, rank: int, size: int, address: str) -> Any:
    import keras

    import hvpipe
    import hvpipe.keras as hk

    hvpipe.init()
    rank, size = hvpipe.rank(), hvpipe.size()
    model = hk.data_parallel(make_model(keras, case), sync_batch_norm=case == "batchnorm")
    fit(keras, model, case, rank, batches(case, rank, size))
    return model


LIBRARIES = {"torch": on_torch, "jax": on_jax, "hvpipe": on_hvpipe}


def main() -> None:
    library, case, rank, size, address, file = sys.argv[1:]
    if library != "hvpipe":
        os.environ["KERAS_BACKEND"] = library
    import numpy as np

    model = LIBRARIES[library](case, int(rank), int(size), address)
    if library == "hvpipe":
        import hvpipe

        rank = str(hvpipe.rank())
    np.savez(f"{file}-{rank}.npz", *[np.asarray(v) for v in model.weights])


if __name__ == "__main__":
    main()
