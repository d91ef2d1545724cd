"""The logs of a pipeline's steps: loss and metrics of the epoch so far, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvpipe.errors import MismatchError
from hvpipe.keras.pipeline.step import StepResult
from hvpipe.session import Session


class PipelineLogs:
    """Loss and metrics since `reset`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shapes: dict[str, tuple[int, ...]] | None = None  # of the metrics, by name
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self._loss_sum = 0.0
        self._samples = 0
        self._samples_here = 0  # samples for which this rank has computed the outputs

    def state(self) -> tuple[float, int, int]:
        """Return what `resume` continues from."""
        return self._loss_sum, self._samples, self._samples_here

    def resume(self, loss_sum: float, samples: int, samples_here: int) -> None:
        """Continue an epoch from its `state`."""
        self._loss_sum, self._samples, self._samples_here = loss_sum, samples, samples_here

    @property
    def names(self) -> list[str]:
        """The metrics' names in order, without the loss; known after a step."""
        return list(self._shapes or ())

    def add(
        self,
        result: StepResult,
        samples: int,
        metrics: Callable[[], Mapping[str, Any]],
        weights: Callable[[], Mapping[str, float]],
        learning_rate: float = 0.0,
    ) -> dict[str, Any]:
        """Add a step and return the logs; collective.

        If the last stage has several replicas, a metric is the mean over them, weighted by its own weights if
        it is a mean itself, otherwise by their samples.

        Args:
            result: This rank's part of the step.
            samples: The samples of the whole batch.
            metrics: Returns this rank's metrics as float64 arrays. Called only on ranks that have computed
                outputs.
            weights: Returns, for metrics that are means, the sums of their weights. Called likewise.
            learning_rate: This rank's learning rate.

        Returns:
            Loss and metrics by name, as floats or arrays.

        Raises:
            MismatchError: The learning rate differs between ranks.
        """
        self._samples += samples
        self._samples_here += result.samples
        here, own = (metrics(), weights()) if self._samples_here else (None, {})
        if self._shapes is None:
            mine = None if here is None else {name: value.shape for name, value in here.items()}
            everyone = self._session.engine.allgather_object(mine, "metrics of the first step")
            self._shapes = next(shapes for shapes in everyone if shapes is not None)
        flat = [np.ravel((here or {}).get(name, np.zeros(shape))) for name, shape in self._shapes.items()]
        counts = [
            np.full(len(value), own.get(name, self._samples_here))
            for name, value in zip(self._shapes, flat, strict=True)
        ]
        row = np.concatenate([[result.loss, learning_rate, self._samples_here], *flat, *counts])
        rows = self._session.engine.allgather(row[None].astype(np.float64))
        _check_learning_rates(rows[:, 1])
        self._loss_sum += float(rows[:, 0].sum()) * samples
        values, by_value = np.split(rows[:, 3:], 2, axis=1)
        # A mean of weights 0, or of values without samples.
        by_value = np.where(by_value.any(axis=0), by_value, rows[:, 2:3])
        means = (by_value * values).sum(axis=0) / by_value.sum(axis=0)
        return {"loss": self._loss_sum / self._samples, **_named(self._shapes, means)}


def _check_learning_rates(rates: Any) -> None:
    odd = [rank for rank, rate in enumerate(rates) if not np.array_equal(rate, rates[0], equal_nan=True)]
    if odd:
        raise MismatchError(
            "The learning rate should be the same on all ranks: pass callbacks that change it on every "
            f"rank. Received: {rates[0]:g} on rank 0 and {rates[odd[0]]:g} on rank {odd[0]}"
        )


def flat_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results of metrics by name, as float64 arrays.

    A metric may return several values in a dict. Each gets its own name, as in the logs that Keras hands to
    callbacks.
    """
    found: dict[str, Any] = {}
    for name, value in sorted(results.items()):
        if isinstance(value, Mapping):
            found |= flat_results(value)
        else:
            found[name] = np.asarray(value, np.float64)
    return found


def _named(shapes: Mapping[str, tuple[int, ...]], values: Any) -> dict[str, Any]:
    """Return metrics by name, cut from a row of all values: floats, or arrays with an axis of classes."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(values, ends[:-1]) if shapes else []
    found = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(shape) if shape else float(part[0]) for (name, shape), part in found}
