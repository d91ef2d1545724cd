"""Measures what a rank of a pipeline spends on an action beside the layers' own time: `Cluster.action_s`."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import keras
import numpy as np

from hvpipe.keras.pipeline.model import pipeline_parallel
from hvpipe.session import Session

_WARM_UPS, _ROUNDS = 2, 7
_MORE_MICROBATCHES = 16


def measure_action_s(session: Session) -> float:
    """Return the seconds of an action; collective, the same on all ranks.

    A model with one tiny layer on each rank trains on few and on many micro-batches in turn. Each further
    micro-batch costs the slowest rank a forward and a backward of next to no computing. One rank has no
    pipeline, and no such cost.
    """
    ranks = session.world.size
    if ranks == 1:
        return 0.0
    few = max(4, ranks)
    many = few + _MORE_MICROBATCHES
    state = random.getstate()
    pipe = pipeline_parallel(_tiny_model(ranks), microbatches=many)
    random.setstate(state)  # layers draw default seeds from it, so a later model has the same weights
    pipe.compile(keras.optimizers.SGD(0.0), "mse")
    rounds = [(_step_s(pipe, few), _step_s(pipe, many)) for _ in range(_WARM_UPS + _ROUNDS)][_WARM_UPS:]
    more_s = statistics.median(many_s - few_s for few_s, many_s in rounds)
    slowest_s: float = max(session.engine.allgather_object(more_s))
    return max(0.0, slowest_s / (2 * _MORE_MICROBATCHES))


def _tiny_model(layers: int) -> keras.Model:
    """Return a model whose layers have names of their own, so that a later model has its usual ones."""
    dense = [
        keras.layers.Dense(1, kernel_initializer="zeros", name=f"hvpipe_action_{i}") for i in range(layers)
    ]
    return keras.Sequential([keras.Input((1,), name="hvpipe_action"), *dense], name="hvpipe_actions")


def _step_s(pipe: Any, microbatches: int) -> float:
    """Return the seconds of a step on so many samples, and so on as many micro-batches."""
    batch = np.zeros((microbatches, 1), np.float32)
    started_s = time.perf_counter()
    pipe.train_on_batch(batch, batch)
    return time.perf_counter() - started_s
