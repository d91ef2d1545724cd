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
_FEW, _MANY = 4, 20  # micro-batches


def measure_action_s(session: Session) -> float:
    """Return the seconds of an action; collective, the same on all ranks.

    A model with one tiny layer on each rank trains on few and on many micro-batches in turn. With GPipe's
    schedule each further micro-batch costs the slowest rank a forward and a backward of next to no computing,
    and no rank waits for a message. One rank has no pipeline, and no such cost.
    """
    ranks = session.world.size
    if ranks == 1:
        return 0.0
    counted = len(session.step_durations_s), len(session.sample_counters)
    with session.engine.unrecorded():
        pipe = _tiny_pipeline(ranks)
        rounds = [(_step_s(pipe, _FEW), _step_s(pipe, _MANY)) for _ in range(_WARM_UPS + _ROUNDS)]
    del session.step_durations_s[counted[0] :], session.sample_counters[counted[1] :]
    more_s = statistics.median(many_s - few_s for few_s, many_s in rounds[_WARM_UPS:])
    slowest_s: float = max(session.engine.allgather_object(more_s, "measuring pipeline actions"))
    return max(0.0, slowest_s / (2 * (_MANY - _FEW)))


def _tiny_pipeline(stages: int) -> Any:
    """Return a compiled pipeline that leaves random numbers and layer names of the process as they were.

    Neither the policy of types nor settings that check steps apply to it.
    """
    state = random.getstate()  # layers draw default seeds from it
    layers = [
        keras.layers.Dense(1, kernel_initializer="zeros", dtype="float32", name=f"hvpipe_action_{i}")
        for i in range(stages)
    ]
    first = keras.Input((1,), dtype="float32", name="hvpipe_action")
    pipe = pipeline_parallel(
        keras.Sequential([first, *layers], name="hvpipe_actions"),
        microbatches=_MANY,
        schedule="gpipe",
        verify_every=1 << 30,
        nonfinite="ignore",
    )
    random.setstate(state)
    pipe.compile(keras.optimizers.SGD(0.0), "mse", auto_scale_loss=False)
    return pipe


def _step_s(pipe: Any, microbatches: int) -> float:
    """Return the seconds of a step on micro-batches of one sample each."""
    batch = np.zeros((microbatches, 1), np.float32)
    started_s = time.perf_counter()
    pipe.train_on_batch(batch, batch)
    return time.perf_counter() - started_s
