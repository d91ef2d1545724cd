"""The time of each step of a Keras `fit`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def timed_fit(keras: Any, model: Any, data: Any, steps: int, within: Sequence[Any] = ()) -> list[float]:
    """Train some steps, and return the seconds of each.

    What the callbacks `within` do at the end of a batch is part of the step.
    """
    marks_s: list[float] = []

    class StepTimer(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not marks_s:
                marks_s.append(time.perf_counter())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            marks_s.append(time.perf_counter())

    callbacks = [*within, StepTimer()]
    model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, shuffle=False, callbacks=callbacks)
    return [after - before for before, after in pairwise(marks_s)]
