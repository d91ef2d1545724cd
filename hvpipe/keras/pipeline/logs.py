"""What a pipeline tells of its steps: loss and metrics so far in an epoch, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvpipe.errors import MismatchError
from hvpipe.keras.pipeline.step import Outcome
from hvpipe.session import Session


class PipelineLogs:
    """Loss and metrics since `reset`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.forget()

    def forget(self) -> None:
        """The metrics are others from now on."""
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._loss_sum = 0.0
        self._samples = 0
        self._samples_here = 0  # whose outputs this rank has had

    @property
    def names(self) -> list[str]:
        """Of the metrics without the loss, in their order; known after a step."""
        return list(self._shapes or ())

    def add(
        self,
        outcome: Outcome,
        samples: int,
        metrics: Callable[[], Mapping[str, Any]],
        learning_rate: float = 0.0,
    ) -> dict[str, Any]:
        """Count a step on `samples`; loss and metrics by name, floats or arrays. Collective.

        `metrics` gives those of this rank, as float64 arrays, and is called where outputs have been. What
        several replicas of the last stage have counts by the samples of each. Raises MismatchError where
        the learning rate is another on some rank.
        """
        self._samples += samples
        self._samples_here += outcome.samples
        here = metrics() if self._samples_here else None
        if self._shapes is None:
            mine = None if here is None else {name: value.shape for name, value in here.items()}
            everyone = self._session.engine.allgather_object(mine)
            self._shapes = next(shapes for shapes in everyone if shapes is not None)
        flat = [np.ravel((here or {}).get(name, np.zeros(shape))) for name, shape in self._shapes.items()]
        row = np.concatenate([[outcome.loss, learning_rate, self._samples_here], *flat])
        rows = self._session.engine.allgather(row[None].astype(np.float64))
        _check_learning_rates(rows[:, 1])
        self._loss_sum += float(rows[:, 0].sum()) * samples
        means = (rows[:, 2:3] * rows[:, 3:]).sum(axis=0) / rows[:, 2].sum()
        return {"loss": self._loss_sum / self._samples, **_named(self._shapes, means)}


def _check_learning_rates(rates: Any) -> None:
    """Each rank updates its own stages by its own optimizer."""
    odd = [rank for rank, rate in enumerate(rates) if not np.array_equal(rate, rates[0], equal_nan=True)]
    if odd:
        raise MismatchError(
            "The learning rate should be the same on all ranks: give the callbacks that change it to all of "
            f"them. Received: {rates[0]:g} on rank 0 and {rates[odd[0]]:g} on rank {odd[0]}"
        )


def flat_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results of metrics by name, as float64 arrays; where one gives several in a dict, each by its own name.

    So does Keras when it hands them to callbacks.
    """
    found: dict[str, Any] = {}
    for name, value in sorted(results.items()):
        if isinstance(value, Mapping):
            found |= flat_results(value)
        else:
            found[name] = np.asarray(value, np.float64)
    return found


def _named(shapes: Mapping[str, tuple[int, ...]], values: Any) -> dict[str, Any]:
    """Numbers, and arrays where a metric has one value for each class, from all values in a row."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(values, ends[:-1]) if shapes else []
    found = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(shape) if shape else float(part[0]) for (name, shape), part in found}
